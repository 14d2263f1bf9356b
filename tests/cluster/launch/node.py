"""`megarl launch` on one node, for an arbitrary command; time limits are long unless the environment sets them.

python -m tests.cluster.launch.node RANK SIZE PORT JUMP_FILE fake|real COMMAND...
"""

import os
import sys
from pathlib import Path

from megarl.cli.options import print_error
from megarl.cluster.launch import launch_node, ray_node
from megarl.cluster.launch.launch_node import LaunchOptions, launch
from megarl.cluster.launch.node_world import detect_node_world, with_secret
from megarl.cluster.process import child_processes
from megarl.cluster.process.launcher_env import stop_signal_blocked
from megarl.errors import MegarlError
from tests.cluster.launch.skewed_clock import skew_clocks_once_exists
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS


def notify(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    rank, size, port, jump_file, ray, *command = sys.argv[1:]
    skew_clocks_once_exists(Path(jump_file))
    if ray == "fake":
        ray_node.RAY_START = "tests.cluster.launch.fake_ray"
    ray_node.START_TIMEOUT_SECONDS = HANG_SECONDS
    if "refuse" in os.environ.get("FAKE_RAY", ""):
        ray_node.TAIL_TIMEOUT_SECONDS = HANG_SECONDS
    for name in ("COMMAND_GRACE_SECONDS", "REPEATED_SIGNAL_SECONDS"):
        setattr(launch_node, name, float(os.environ.get(name, UNREACHED_SECONDS)))
    child_processes.GRACE_SECONDS = 0.3
    world = detect_node_world({}, rank=int(rank), size=int(size), head=f"127.0.0.1:{port}")
    world = with_secret(world, os.environ, insecure=False)
    options = LaunchOptions(join_timeout=HANG_SECONDS, node_timeout=HANG_SECONDS, cpus=2, labels={})
    try:
        with stop_signal_blocked():
            return launch(world, options, command, notify=notify)
    except MegarlError as error:
        print_error(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
