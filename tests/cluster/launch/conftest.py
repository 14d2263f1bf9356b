"""Fixtures: simulated hosts, a tiny model with data for the session, and time limits for nodes in this process."""

import asyncio
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.launch import rendezvous
from tests.cluster.launch import in_process
from tests.cluster.launch.hosts import Hosts
from tests.cluster.launch.skewed_clock import skew_clocks
from tests.end_to_end.tiny_world import write_world
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS

PATIENT = {"start_timeout_seconds": UNREACHED_SECONDS, "node_check_timeout_seconds": UNREACHED_SECONDS}
"""Time limits of the section `placement`."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines, each on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    parameters = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in parameters}))
    return True


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a tiny model in `model/` and its data in `data/`."""
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def hosts(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts that share pytest's folders."""
    with Hosts(2, tmp_path, shared=[tmp_path_factory.getbasetemp()]) as hosts:
        yield hosts


@pytest.fixture
def own_ports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes in this process have a job, and so ports, of this test only, and answer at their leisure."""
    monkeypatch.setattr(in_process, "current_job", request.node.name)
    monkeypatch.setattr(rendezvous, "ANSWER_TIMEOUT_SECONDS", HANG_SECONDS)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits of the rendezvous count in looks at the clock: a node tries so many addresses of the head."""
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=itertools.count().__next__))


class Clock:
    """What the clocks run ahead of the machine's."""

    offset = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Clock of the rendezvous and of event loops, which the test advances."""
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", asyncio.BaseEventLoop.time)
    monkeypatch.setattr(rendezvous, "time", rendezvous.time)
    clock = Clock()
    skew_clocks(lambda: clock.offset)
    return clock
