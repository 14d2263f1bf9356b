"""Start-up checks of a cluster: what is asked for a run, and what is said where something is wrong."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ray
from rich.console import Console

from megarl.config import StageConfig
from megarl.config.algorithms.algorithm import FrozenModelConfig
from megarl.config.placement import PlacementConfig
from megarl.config.reward import ModelRewardConfig
from megarl.config.section import Section
from megarl.errors import ConfigError, WorkerError
from megarl.placement.nodes import ClusterNode, cluster_nodes
from megarl.placement.pool import start_cluster
from megarl.preflight.cluster.cluster_probe import surveyed
from megarl.preflight.cluster.findings import ANSWER, GLOO, REACH, REDUCTION, Problem, find_problems, sentences
from megarl.preflight.cluster.node_report import NodeReport, Question
from megarl.preflight.cluster.node_table import nodes_table
from megarl.preflight.cluster.probe_actor import Backend
from megarl.preflight.tiny_model import will_write_model

LOG_WIDTH = 160
"""Columns of the table where it goes to a file or a pipe."""

REDUCTION_NEEDS = (ANSWER, "torch", GLOO, REACH)
"""What must be sound before it is worth its time; the rest is told without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Absolute paths that a run uses on every node, by key of the configuration."""

    readable: Mapping[str, str] = field(default_factory=dict)
    """Files and models' folders."""
    writable: Mapping[str, str] = field(default_factory=dict)
    """Folders that are there on the asking node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCheck:
    """What came out."""

    reports: tuple[NodeReport, ...]
    problems: tuple[Problem, ...]
    seconds: float

    @property
    def sentences(self) -> list[str]:
        """What is wrong."""
        return sentences(self.problems, len(self.reports))

    @property
    def line(self) -> str:
        """What was done."""
        count = len(self.reports)
        return f"{count} {'node' if count == 1 else 'nodes'} checked in {self.seconds:.1f} s"


def require_sound_nodes(placement: PlacementConfig, places: Places) -> str | None:
    """Return what was checked, in a line; None where `placement.node_checks` asks for nothing.

    Raises:
        ConfigError, WorkerError: every problem, one a line; the nodes' table is on stderr then.
    """
    nodes = cluster_nodes()
    asked = len(nodes) > 1 if placement.node_checks is None else placement.node_checks
    if not asked:
        return None
    check = check_nodes(nodes, places, placement)
    if not check.problems:
        return check.line
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=LOG_WIDTH)
    console.print(nodes_table(check.reports, check.problems))
    kind = WorkerError if any(p.about in (ANSWER, REACH, REDUCTION) for p in check.problems) else ConfigError
    raise kind("\n".join(check.sentences))


def places_of(config: StageConfig) -> Places:
    """Those of a run, whose paths are absolute."""
    readable = {"data.path": config.data.path, "data.eval_path": config.data.eval_path}
    if not will_write_model(config):
        readable["model.path"] = config.model.path
    readable |= dict(_models(config, ""))
    writable = {"run_dir": config.run_dir}
    if not Path(config.export_path).is_relative_to(config.run_dir):
        writable["export_dir"] = config.export_path
    return Places(
        readable={key: path for key, path in readable.items() if path is not None},
        writable={key: str(_existing(Path(folder))) for key, folder in writable.items()},
    )


def _models(section: Section, key: str) -> Iterator[tuple[str, str]]:
    """Of models beside the policy that have a folder of their own."""
    if isinstance(section, FrozenModelConfig | ModelRewardConfig) and section.path is not None:
        yield f"{key}path", section.path
    for name, value in section:
        if isinstance(value, Section):
            yield from _models(value, f"{key}{name}.")
        elif isinstance(value, dict):
            for each, below in value.items():
                if isinstance(below, Section):
                    yield from _models(below, f"{key}{name}.{each}.")


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_cluster(places: Places, placement: PlacementConfig) -> ClusterCheck:
    """As `check_nodes`, of the cluster at RAY_ADDRESS, which is joined and left.

    Raises:
        ConfigError: no cluster answers there, or a folder of `places.writable` cannot be written from here.
    """
    try:
        start_cluster(placement)
        return check_nodes(cluster_nodes(), places, placement)
    finally:
        ray.shutdown()


def check_nodes(nodes: Sequence[ClusterNode], places: Places, placement: PlacementConfig) -> ClusterCheck:
    """What nodes say, and what is wrong with them; nothing is left running.

    Raises:
        ConfigError: a folder of `places.writable` cannot be written from here.
    """
    started = time.perf_counter()
    timeout = placement.node_check_timeout_seconds
    with _question(places) as question, surveyed(nodes, timeout_seconds=timeout) as survey:
        reports = survey.reports(question)
        held = ray.cluster_resources().get("GPU", 0.0) - ray.available_resources().get("GPU", 0.0)
        problems = find_problems(reports, gpus_held=held)
        problems += survey.unreached(reports)
        backends: list[Backend] = ["gloo"] if placement.device == "cpu" else ["gloo", "nccl"]
        for backend in backends:
            if not any(problem.about in (*REDUCTION_NEEDS, REDUCTION) for problem in problems):
                problems += survey.reduce(reports, backend)
    seconds = time.perf_counter() - started
    return ClusterCheck(reports=tuple(reports), problems=tuple(problems), seconds=seconds)


@contextmanager
def _question(places: Places) -> Iterator[Question]:
    """Puts a file into every folder that is to be written, for the time of the block."""
    token = f".megarl-node-check-{uuid.uuid4().hex[:8]}"
    with ExitStack() as files:
        for key, folder in places.writable.items():
            path = Path(folder) / token
            files.callback(path.unlink, missing_ok=True)
            try:
                path.touch()
            except OSError as error:
                raise ConfigError(f"{key}: {folder} cannot be written: {error.strerror}") from error
        yield Question(readable=places.readable, writable=places.writable, token=token)
