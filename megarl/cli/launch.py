"""`megarl launch COMMAND...`: run a megarl command on a Ray cluster of several nodes.

srun --ntasks-per-node=1 megarl launch train CONFIG
torchrun --nnodes N --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m megarl launch train CONFIG
megarl launch --nodes N --node-rank R --head HOST train CONFIG

Several nodes need the same secret in MEGARL_LAUNCH_SECRET.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from megarl.cluster.launch.launch_node import LaunchOptions, launch
from megarl.cluster.launch.node_world import SECRET_VARIABLE, detect_node_world, parse_labels, with_secret
from megarl.errors import ConfigError

COMMANDS = ("train", "sft", "rm", "dpo", "eval", "score", "convert", "doctor")
"""Commands that can be launched: those that run on a Ray cluster."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the cluster and of this node, and `COMMAND ...`."""
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default: Slurm's or torchrun's)")
    parser.add_argument("--node-rank", type=int, metavar="R", help="rank of this node (default: Slurm's or torchrun's)")
    parser.add_argument("--head", metavar="HOST[:PORT]", help="address of rank 0 (default: Slurm's or torchrun's)")
    parser.add_argument(
        "--node-address", metavar="ADDRESS", help="address of this node (default: the one it reaches rank 0 with)"
    )
    parser.add_argument(
        "--join-timeout", type=float, default=60.0, metavar="S", help="seconds to wait for all nodes to join (60)"
    )
    parser.add_argument(
        "--node-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds without contact after which a node counts as lost and the launch fails (30)",
    )
    parser.add_argument("--cpus", type=int, metavar="N", help="CPU slots of this node (default: Slurm's, or all)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of this node (default: those that Ray finds)")
    parser.add_argument(
        "--labels",
        action="append",
        default=[],
        metavar="K=V[,K=V...]",
        help="Ray labels of this node, which placement.pools select nodes by",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help=f"start without a secret in {SECRET_VARIABLE}: anyone who reaches the nodes can then execute code on them",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND ...",
        help=f"one of {', '.join(COMMANDS)}, with its arguments; it runs on rank 0",
    )


def run(args: argparse.Namespace) -> int:
    """Form the cluster and run the command; return its exit code, on every node."""
    if not args.command or args.command[0] not in COMMANDS:
        raise ConfigError(
            f"launch needs a command, one of {', '.join(COMMANDS)}, got {' '.join(args.command) or 'none'}"
        )
    for name in ("join_timeout", "node_timeout"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} needs a number above 0, got {getattr(args, name):g}")
    world = detect_node_world(os.environ, rank=args.node_rank, size=args.nodes, head=args.head)
    world = with_secret(world, os.environ, insecure=args.insecure)
    options = LaunchOptions(
        join_timeout=args.join_timeout,
        node_timeout=args.node_timeout,
        cpus=_num_cpus(os.environ) if args.cpus is None else args.cpus,
        gpus=args.gpus,
        labels=parse_labels(args.labels),
        node_address=args.node_address,
    )
    return launch(world, options, [sys.executable, "-m", "megarl", *args.command], notify=_print_progress)


def _num_cpus(environment: Mapping[str, str]) -> int:
    slurm = environment.get("SLURM_CPUS_ON_NODE")
    return len(os.sched_getaffinity(0)) if slurm is None else int(slurm)


def _print_progress(line: str) -> None:
    # stdout belongs to the command
    print(line, file=sys.stderr, flush=True)
