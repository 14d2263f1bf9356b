"""Fixtures: a Slurm cluster for the session, and jobs that end with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.launch.slurm.cluster import SlurmCluster, missing
from tests.cluster.launch.slurm.job import Job
from tests.required_tools import skip_or_fail

Submit = Callable[..., Job]


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Slurm cluster with the nodes n1 and n2."""
    reason = missing()
    if reason is not None:
        skip_or_fail(reason)
    cluster = SlurmCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


@pytest.fixture
def submit(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Submit]:
    """Function that submits a script of launch/slurm; the output of the job goes to `folder`/log."""
    jobs: list[Job] = []

    def start(script: str, *arguments: str | Path, folder: Path = tmp_path, options=(), **knobs: str) -> Job:
        slurm.wait_until_idle()
        jobs.append(Job(slurm, folder, script, *arguments, options=options, **knobs))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()
