"""`python -m megarl.launch.ray_start`: Ray's `ray start`, imported before its arguments are known.

The import takes a second or two, in which the nodes of a run find each other. Then one line on stdin says

    {"arguments": ["--head", ...], "environment": {"GLOO_SOCKET_IFNAME": "eth0"}}
"""

from __future__ import annotations

import json
import os
import sys

from ray.scripts.scripts import main


def start() -> None:
    """Run `ray start`; return without, where stdin ends first."""
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    os.environ.update(order["environment"])
    sys.argv = ["ray", "start", *order["arguments"]]
    main()


if __name__ == "__main__":
    start()
