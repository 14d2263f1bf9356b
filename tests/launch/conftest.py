"""Hosts, and one tiny world for the session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.tiny_world import write_world
from tests.launch.hosts import Hosts, missing

MakeHosts = Callable[..., Hosts]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` and `data/`."""
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def make_hosts(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeHosts]:
    """Two hosts that share pytest's folders, `delay` seconds apart."""
    lacking = missing()
    if lacking is not None:
        pytest.skip(lacking)
    with contextlib.ExitStack() as stack:
        yield lambda delay=0.0: stack.enter_context(
            Hosts(2, tmp_path, shared=[tmp_path_factory.getbasetemp()], delay=delay)
        )
