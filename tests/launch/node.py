"""`megarl launch` on one node, for an arbitrary command.

python -m tests.launch.node RANK SIZE PORT NODE_TIMEOUT fake|real COMMAND...
"""

import os
import sys

from megarl.cli.output import print_error
from megarl.errors import MegarlError
from megarl.launch import head_node, ray_node
from megarl.launch.launch import launch
from megarl.launch.launch_node import LaunchOptions
from megarl.launch.node_world import detect_node_world, with_secret
from megarl.process import subreaper
from megarl.process.early_stop_signal import stop_signal_blocked


def notify(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    rank, size, port, node_timeout, ray, *command = sys.argv[1:]
    if ray == "fake":
        ray_node.RAY_START = "tests.launch.fake_ray"
    head_node.COMMAND_GRACE_SECONDS = float(os.environ.get("COMMAND_GRACE_SECONDS", "1"))
    subreaper.GRACE_SECONDS = 0.3
    world = detect_node_world({}, rank=int(rank), size=int(size), head=f"127.0.0.1:{port}")
    world = with_secret(world, os.environ, insecure=False)
    options = LaunchOptions(
        join_timeout=float(os.environ["JOIN_TIMEOUT"]), node_timeout=float(node_timeout), cpus=2, labels={}
    )
    try:
        with stop_signal_blocked():
            return launch(world, options, command, notify=notify)
    except MegarlError as error:
        print_error(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
