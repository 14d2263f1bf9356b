"""Fixtures for all tests: one local Ray cluster per session."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.schedule import position, scope

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

CLUSTER_SLOTS = 6

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # SIGINT is ignored in background jobs of a shell; the children of tests would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Distribute the tests as `tests/schedule.py` says."""
    from xdist.scheduler import LoadScopeScheduling

    class Schedule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    return Schedule(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: position(item.nodeid))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need more CUDA devices than there are."""
    needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if needed:
        import torch

        found = torch.cuda.device_count()
        if found < needed:
            pytest.skip(f"needs {needed} CUDA device{'s' if needed > 1 else ''}, found {found}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test on the CPU, as without CUDA devices, and on one CUDA device."""
    import torch

    if request.param == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return str(request.param)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Start a local Ray cluster with `CLUSTER_SLOTS` slots for the session; this process is its driver."""
    import ray

    from megarl.config.placement import PlacementConfig
    from megarl.placement.pool import start_cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")
        # rollout workers import reward functions from tests
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])))
        assert start_cluster(PlacementConfig(slots_per_node=CLUSTER_SLOTS))
        yield
        ray.shutdown()
