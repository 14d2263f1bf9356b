"""Fixtures: simulated hosts, and a tiny model with data for the session."""

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
    """Folder with a tiny model in `model/` and its data in `data/`."""
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def make_hosts(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeHosts]:
    """Factory of two hosts that share pytest's folders, with a network delay of `delay` seconds."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda delay=0.0: stack.enter_context(
            Hosts(2, tmp_path, shared=[tmp_path_factory.getbasetemp()], delay=delay)
        )
