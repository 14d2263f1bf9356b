"""`python -m megarl.cluster.launch.ray_start`: `ray start` with Ray imported before its arguments are known.

The import takes a second or two, during which the nodes connect. Then the arguments arrive as one line on stdin:

    {"arguments": ["--head", ...], "environment": {"GLOO_SOCKET_IFNAME": "eth0"}, "timeout_seconds": 120.0}
"""

from __future__ import annotations

import json
import os
import sys

from ray.scripts import scripts

from megarl.cluster.placement.pool import node_start
from megarl.errors import WorkerError


def start() -> None:
    """Read the arguments from stdin and run `ray start`; return at once if stdin ends first, exit 1 if Ray fails."""
    line = sys.stdin.readline()
    if not line:
        return
    request = json.loads(line)
    os.environ.update(request["environment"])
    sys.argv = ["ray", "start", *request["arguments"]]
    # `ray start` has no option that keeps the head from serving Ray Client, a port that executes code: it starts the
    # server wherever this function reports no missing dependency
    scripts.get_ray_client_dependency_error = lambda: "megarl launch does not serve Ray Client"
    try:
        with node_start(request["timeout_seconds"], "the time limit of megarl launch"):
            scripts.main()
    except WorkerError as e:
        sys.exit(str(e))


if __name__ == "__main__":
    start()
