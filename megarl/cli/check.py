"""`megarl check`: find the errors of a configuration on a CPU, without starting a process.

It imports, and so executes, the modules that the configuration names by import path, such as reward functions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megarl.cli.options import add_config_options
from megarl.config import STAGES, dump_config, load_config
from megarl.config.import_path import recorded_imports
from megarl.config.placement import PlacementConfig
from megarl.errors import ConfigError
from megarl.launch.slurm_time_limit import parse_time_limit
from megarl.model_files.hub import with_local_models
from megarl.placement.assign import assign_nodes, resolve_device
from megarl.placement.nodes import ClusterNode, planned_nodes
from megarl.preflight.model_checks import find_model_notices
from megarl.preflight.run_checks import check_or_raise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `CONFIG [--set KEY=VALUE ...] [--stage train|sft|rm|dpo]`, and the nodes and time limit of a job."""
    add_config_options(parser)
    parser.epilog = (
        "No process is started, but modules that CONFIG names by import path (package.module:name), such as reward "
        "functions, are imported, which executes them: check only configurations that you trust. A line of the output "
        "names each of them."
    )
    parser.add_argument("--stage", choices=tuple(STAGES), default="train", help="command that CONFIG is for")
    job = parser.add_argument_group("for a job on other nodes; of a heterogeneous job, one number per component")
    job.add_argument("--nodes", type=int, nargs="+", metavar="N", help="number of nodes")
    job.add_argument("--gpus-per-node", type=int, nargs="+", metavar="N", help="GPUs per node")
    job.add_argument(
        "--cpus-per-node", type=int, nargs="+", metavar="N", help="CPU slots per node, for runs without GPUs"
    )
    job.add_argument("--time", metavar="LIMIT", help="time limit of the job, in the format of sbatch --time")


def run(args: argparse.Namespace) -> int:
    """Print the resolved configuration as YAML; the last line is a comment that starts with `ok`.

    Before it, a comment names each module that was imported, also if problems were found.

    Raises:
        ConfigError: lists all problems.
    """
    nodes = _planned_nodes(args)
    if args.time is not None:
        parse_time_limit(args.time)
    slots = None if nodes is None or args.stage == "train" else (len(nodes), max(nodes[0].gpus, nodes[0].cpus))
    with recorded_imports() as imported:
        try:
            config = load_config(STAGES[args.stage], args.config, args.overrides, slots=slots)
            config = with_local_models(config)
            check_or_raise(config, nodes)
        finally:
            for key, path in imported.items():
                print(f"# imported {path.partition(':')[0]} for {key}: {path}")
    print(dump_config(config), end="")
    for line in _describe_pools(config.placement, nodes) if nodes else ():
        print(f"# {line}")
    for notice in find_model_notices(config):
        print(f"# {notice}")
    print(f"# ok: no problems found for megarl {args.stage}")
    return 0


def _planned_nodes(args: argparse.Namespace) -> list[ClusterNode] | None:
    """Return the nodes that the job would get, or None where the run is for this machine."""
    each = {"--nodes": args.nodes, "--gpus-per-node": args.gpus_per_node, "--cpus-per-node": args.cpus_per_node}
    given = {name: counts for name, counts in each.items() if counts is not None}
    if not given:
        return None
    if "--nodes" not in given or len(given) == 1:
        raise ConfigError(
            f"--nodes needs --gpus-per-node or --cpus-per-node, and those need --nodes, got {' '.join(given)}"
        )
    components = len(args.nodes)
    for name, counts in given.items():
        if len(counts) != components:
            raise ConfigError(f"{name}: needs one number per value of --nodes, got {len(counts)} for {components}")
        least = 1 if name == "--nodes" else 0
        if min(counts) < least:
            raise ConfigError(f"{name}: needs numbers of at least {least}, got {min(counts)}")
    none = [0] * components
    return planned_nodes(args.nodes, gpus=args.gpus_per_node or none, cpus=args.cpus_per_node or none)


def _describe_pools(placement: PlacementConfig, nodes: Sequence[ClusterNode]) -> list[str]:
    """Return one line per pool with its nodes, and one for idle slots."""
    device = resolve_device(placement, nodes)
    unit = "GPUs" if device == "cuda" else "CPU slots"
    chosen = assign_nodes(placement.all_pools, nodes, device)
    lines = []
    for name, pool in placement.all_pools.items():
        hostnames = " ".join(node.hostname for node in chosen[name])
        lines.append(f"pool {name}: {pool.slots_per_node} {unit} on each of {hostnames}")
    idle = sum(node.slots(device) for node in nodes) - placement.total_slots
    return [*lines, f"idle: {idle} {unit}"] if idle else lines
