"""`python -m megarl.launch.ray_start`: `ray start` with Ray imported before its arguments are known.

The import takes a second or two, during which the nodes connect. Then the arguments arrive as one line on stdin:

    {"arguments": ["--head", ...], "environment": {"GLOO_SOCKET_IFNAME": "eth0"}}
"""

from __future__ import annotations

import json
import os
import sys

from ray.scripts.scripts import main


def start() -> None:
    """Read the arguments from stdin and run `ray start`; return at once if stdin ends first."""
    line = sys.stdin.readline()
    if not line:
        return
    request = json.loads(line)
    os.environ.update(request["environment"])
    sys.argv = ["ray", "start", *request["arguments"]]
    main()


if __name__ == "__main__":
    start()
