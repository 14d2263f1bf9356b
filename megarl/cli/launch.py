"""`megarl launch COMMAND...`: a megarl command on Ray over several machines.

srun --ntasks-per-node=1 megarl launch train CONFIG
torchrun --nnodes N --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m megarl launch train CONFIG
megarl launch --nodes N --node-rank R --head HOST train CONFIG
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from megarl.errors import ConfigError
from megarl.launch.launch import launch
from megarl.launch.launch_node import LaunchOptions
from megarl.launch.node_labels import parse_labels
from megarl.launch.node_world import node_world

COMMANDS = ("train", "sft", "rm", "dpo", "eval", "score", "convert", "doctor")
"""Those for which a Ray cluster makes a difference."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `megarl.cli.main.Command`."""
    parser.add_argument("--nodes", type=int, metavar="N", help="machines, where neither Slurm nor torchrun says")
    parser.add_argument("--node-rank", type=int, metavar="R", help="of this machine; the command runs on rank 0")
    parser.add_argument("--head", metavar="HOST[:PORT]", help="where the others find rank 0")
    parser.add_argument(
        "--node-address", metavar="ADDRESS", help="where the others find this machine (default: as it reached the head)"
    )
    parser.add_argument(
        "--join-timeout", type=float, default=60.0, metavar="S", help="seconds that machines wait for each other (60)"
    )
    parser.add_argument(
        "--node-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds after which a machine that is not heard of is lost, and the run with it (30)",
    )
    parser.add_argument("--cpus", type=int, metavar="N", help="CPU slots of this machine (default: Slurm's, or all)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of this machine (default: those that Ray finds)")
    parser.add_argument(
        "--labels",
        action="append",
        default=[],
        metavar="K=V[,K=V...]",
        help="labels of this machine, by which placement.pools choose theirs",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND ...",
        help=f"one of {', '.join(COMMANDS)}, as without launch",
    )


def run(args: argparse.Namespace) -> int:
    """The exit code of the command, on every machine."""
    if not args.command or args.command[0] not in COMMANDS:
        raise ConfigError(
            f"launch needs a command, one of {', '.join(COMMANDS)}, got {' '.join(args.command) or 'none'}"
        )
    for name in ("join_timeout", "node_timeout"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} needs a number above 0, got {getattr(args, name):g}")
    world = node_world(os.environ, rank=args.node_rank, size=args.nodes, head=args.head)
    options = LaunchOptions(
        join_timeout=args.join_timeout,
        node_timeout=args.node_timeout,
        cpus=_cpus(os.environ) if args.cpus is None else args.cpus,
        gpus=args.gpus,
        labels=parse_labels(args.labels),
        node_address=args.node_address,
    )
    return launch(world, options, [sys.executable, "-m", "megarl", *args.command], say=_say)


def _cpus(environment: Mapping[str, str]) -> int:
    slurm = environment.get("SLURM_CPUS_ON_NODE")
    return len(os.sched_getaffinity(0)) if slurm is None else int(slurm)


def _say(line: str) -> None:
    # stdout is the command's
    print(line, file=sys.stderr, flush=True)
