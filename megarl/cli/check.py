"""`megarl check`: everything that can be found wrong with a configuration on a CPU, in one pass."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megarl.cli.options import add_config_options
from megarl.config import STAGES, dump_config, load_config
from megarl.config.placement import PlacementConfig
from megarl.errors import ConfigError
from megarl.launch.slurm_time_limit import parse_time_limit
from megarl.placement.assign import assign_nodes, resolve_device
from megarl.placement.nodes import ClusterNode, planned_nodes
from megarl.preflight.run_checks import require_ready


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`CONFIG [--set KEY=VALUE ...] [--stage train|sft|rm|dpo]`, and the machines that a job will ask for."""
    add_config_options(parser)
    parser.add_argument("--stage", choices=tuple(STAGES), default="train", help="the command that it is for")
    job = parser.add_argument_group("for a job on other machines; one number for each component of a heterogeneous job")
    job.add_argument("--nodes", type=int, nargs="+", metavar="N", help="machines")
    job.add_argument("--gpus-per-node", type=int, nargs="+", metavar="N", help="GPUs of each")
    job.add_argument(
        "--cpus-per-node", type=int, nargs="+", metavar="N", help="CPU slots of each, for runs without GPUs"
    )
    job.add_argument("--time", metavar="LIMIT", help="the time limit of the job, as sbatch takes it")


def run(args: argparse.Namespace) -> int:
    """Print the resolved configuration as YAML, its last line a comment that says ok.

    Raises:
        ConfigError: names every problem.
    """
    nodes = _machines(args)
    if args.time is not None:
        parse_time_limit(args.time)
    slots = None if nodes is None or args.stage == "train" else (len(nodes), max(nodes[0].gpus, nodes[0].cpus))
    config = load_config(STAGES[args.stage], args.config, args.overrides, slots=slots)
    require_ready(config, nodes)
    print(dump_config(config), end="")
    for line in _uses(config.placement, nodes) if nodes else ():
        print(f"# {line}")
    print(f"# ok: nothing found that would stop megarl {args.stage}")
    return 0


def _machines(args: argparse.Namespace) -> list[ClusterNode] | None:
    """What the job would get; None where the run is for this machine."""
    each = {"--nodes": args.nodes, "--gpus-per-node": args.gpus_per_node, "--cpus-per-node": args.cpus_per_node}
    given = {name: counts for name, counts in each.items() if counts is not None}
    if not given:
        return None
    if "--nodes" not in given or len(given) == 1:
        raise ConfigError(
            f"--nodes needs --gpus-per-node or --cpus-per-node, and they need --nodes, got {' '.join(given)}"
        )
    components = len(args.nodes)
    for name, counts in given.items():
        if len(counts) != components:
            raise ConfigError(f"{name}: needs a number for each of --nodes, got {len(counts)} for {components}")
        if min(counts) < (1 if name == "--nodes" else 0):
            raise ConfigError(f"{name}: needs a number of machines or devices, got {min(counts)}")
    none = [0] * components
    return planned_nodes(args.nodes, gpus=args.gpus_per_node or none, cpus=args.cpus_per_node or none)


def _uses(placement: PlacementConfig, nodes: Sequence[ClusterNode]) -> list[str]:
    """What each pool takes, and what is left."""
    device = resolve_device(placement, nodes)
    what = "GPUs" if device == "cuda" else "CPU slots"
    chosen = assign_nodes(placement.all_pools, nodes, device)
    lines = []
    for name, pool in placement.all_pools.items():
        machines = " ".join(node.hostname for node in chosen[name])
        lines.append(f"pool {name}: {pool.slots_per_node} {what} on each of {machines}")
    idle = sum(node.slots(device) for node in nodes) - placement.all_slots
    return [*lines, f"idle: {idle} {what}"] if idle else lines
