"""Check the nodes of a Ray cluster before a run, and report problems."""

from __future__ import annotations

import glob
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ray
from rich.console import Console

from megarl.cluster.placement.assign import ClusterNode, cluster_nodes
from megarl.cluster.placement.pool import start_cluster
from megarl.config import StageConfig
from megarl.config.paths import model_paths
from megarl.config.placement import PlacementConfig
from megarl.controller.preflight.cluster.cluster_probe import Backend, cluster_probe
from megarl.controller.preflight.cluster.findings import (
    ANSWER,
    GLOO,
    REACH,
    REDUCTION,
    Problem,
    find_problems,
    messages,
    nodes_table,
)
from megarl.controller.preflight.cluster.node_report import NodeReport, ProbeRequest
from megarl.controller.preflight.model_checks import will_write_model
from megarl.errors import ConfigError, WorkerError

LOG_WIDTH = 160
"""Width of the table in characters if stderr is not a terminal."""

REDUCTION_PREREQUISITES = (ANSWER, "torch", GLOO, REACH)
"""The all-reduce check is skipped if there is a problem in one of these categories: it would time out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredPaths:
    """Absolute paths that every node must be able to use, by configuration key."""

    readable: Mapping[str, str] = field(default_factory=dict)
    """Data files and model folders that every node must read."""
    writable: Mapping[str, str] = field(default_factory=dict)
    """Folders, existing on the driver's node, that every node must write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCheck:
    """Result of a check of all nodes."""

    reports: tuple[NodeReport, ...]
    problems: tuple[Problem, ...]
    seconds: float

    @property
    def messages(self) -> list[str]:
        """One message per problem."""
        return messages(self.problems, len(self.reports))

    @property
    def summary(self) -> str:
        """One line for the log: number of nodes and duration."""
        count = len(self.reports)
        return f"{count} {'node' if count == 1 else 'nodes'} checked in {self.seconds:.1f} s"


def check_nodes_or_raise(placement: PlacementConfig, paths: RequiredPaths) -> str | None:
    """Check the nodes of the joined cluster and return a one-line summary for the log.

    Returns None without checking if `placement.node_checks` is false, or unset and there is only one node.

    Raises:
        ConfigError, WorkerError: all problems, one per line; a table of the nodes is printed to stderr.
    """
    nodes = cluster_nodes()
    is_due = len(nodes) > 1 if placement.node_checks is None else placement.node_checks
    if not is_due:
        return None
    check = check_nodes(nodes, paths, placement)
    if not check.problems:
        return check.summary
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=LOG_WIDTH)
    console.print(nodes_table(check.reports, check.problems))
    error_type = WorkerError if any(p.category in (ANSWER, REACH, REDUCTION) for p in check.problems) else ConfigError
    raise error_type("\n".join(check.messages))


def required_paths(config: StageConfig) -> RequiredPaths:
    """Return the paths that a run needs on every node; `config` has absolute paths."""
    data = {**config.data.training_files, **config.data.held_out_files}
    readable = {**{key: str(_existing_part(path)) for key, path in data.items()}, **model_paths(config)}
    if will_write_model(config):
        del readable["model.path"]
    writable = {"run_dir": config.run_dir}
    if not Path(config.export_path).is_relative_to(config.run_dir):
        writable["export_dir"] = config.export_path
    return RequiredPaths(
        readable=readable,
        writable={key: str(_existing_parent(Path(folder))) for key, folder in writable.items()},
    )


def _existing_part(path: str) -> Path:
    """Return the path of a data file; of a pattern, the folder whose name has no wildcards."""
    found = Path(path)
    while not found.exists() and glob.has_magic(str(found)):
        found = found.parent
    return found


def _existing_parent(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_cluster(paths: RequiredPaths, placement: PlacementConfig) -> ClusterCheck:
    """Join the cluster at RAY_ADDRESS, run `check_nodes` on it, and disconnect.

    Raises:
        ConfigError: no cluster responds at RAY_ADDRESS, or a folder of `paths.writable` cannot be written here.
    """
    try:
        start_cluster(placement)
        return check_nodes(cluster_nodes(), paths, placement)
    finally:
        ray.shutdown()


def check_nodes(nodes: Sequence[ClusterNode], paths: RequiredPaths, placement: PlacementConfig) -> ClusterCheck:
    """Probe all nodes and return their reports with the problems found; no process is left running.

    Raises:
        ConfigError: a folder of `paths.writable` cannot be written here.
    """
    started = time.perf_counter()
    timeout = placement.node_check_timeout_seconds
    with _probe_request(paths) as request, cluster_probe(nodes, timeout_seconds=timeout) as probe:
        reports = probe.collect_reports(request)
        held = ray.cluster_resources().get("GPU", 0.0) - ray.available_resources().get("GPU", 0.0)
        problems = find_problems(reports, gpus_held=held)
        problems += probe.check_reachability(reports)
        backends: list[Backend] = ["gloo"] if placement.device == "cpu" else ["gloo", "nccl"]
        for backend in backends:
            if not any(problem.category in (*REDUCTION_PREREQUISITES, REDUCTION) for problem in problems):
                problems += probe.all_reduce(reports, backend)
    seconds = time.perf_counter() - started
    return ClusterCheck(reports=tuple(reports), problems=tuple(problems), seconds=seconds)


@contextmanager
def _probe_request(paths: RequiredPaths) -> Iterator[ProbeRequest]:
    """Create a marker file in every writable folder for the duration of the block, and yield the probe request."""
    token = f".megarl-node-check-{uuid.uuid4().hex[:8]}"
    with ExitStack() as files:
        for key, folder in paths.writable.items():
            path = Path(folder) / token
            files.callback(path.unlink, missing_ok=True)
            try:
                path.touch()
            except OSError as error:
                raise ConfigError(f"{key}: {folder} cannot be written: {error.strerror}") from error
        yield ProbeRequest(readable=paths.readable, writable=paths.writable, token=token)
