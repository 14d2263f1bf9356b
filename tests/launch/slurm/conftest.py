"""Fixtures: a Slurm cluster for the session, jobs that end with their test, and a tiny model with data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.tiny_world import write_world
from tests.launch.slurm.cluster import SlurmCluster, missing
from tests.launch.slurm.job import Job

Submit = Callable[..., Job]


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Slurm cluster with the nodes n1 and n2."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    cluster = SlurmCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


@pytest.fixture
def submit(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Submit]:
    """Function that submits a script of launch/slurm; the output of the job goes to `tmp_path`/log."""
    slurm.wait_until_idle()
    jobs: list[Job] = []

    def start(script: str, *arguments: str | Path, options: tuple[str, ...] = (), **knobs: str) -> Job:
        jobs.append(Job(slurm, tmp_path, script, *arguments, options=options, **knobs))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a tiny model in `model/` and its data in `data/`."""
    return write_world(tmp_path_factory.mktemp("world"))
