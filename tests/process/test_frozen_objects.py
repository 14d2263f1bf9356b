"""Objects of a process that has started are left out of garbage collections."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from megarl.process.frozen_objects import freeze_objects
from megarl.workers import worker_host
from megarl.workers.worker_host import AsyncWorkerHost, WorkerHost


class Node:
    """An object that refers to itself, so that only a garbage collection frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def unfreeze() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hosts be created in this process, outside of Ray."""
    monkeypatch.setattr(worker_host, "_read_process_info", lambda: None)


def test_what_was_garbage_is_freed_first_if_asked_for() -> None:
    found = weakref.ref(Node())
    freeze_objects(collect=True)
    assert found() is None


def test_later_collections_visit_later_objects_only() -> None:
    before = weakref.ref(Node())
    freeze_objects()
    after = weakref.ref(Node())
    gc.collect()
    assert before() is not None
    assert after() is None


@pytest.mark.usefixtures("no_ray")
def test_a_worker_that_is_built_is_frozen_with_its_process() -> None:
    WorkerHost({}).build("role", Node, (), {}, 0.0)
    assert gc.get_freeze_count() > 1000


@pytest.mark.usefixtures("no_ray")
def test_an_asynchronous_worker_that_is_built_is_frozen_with_its_process() -> None:
    async def run() -> None:
        await AsyncWorkerHost({}).build(Node, (), {}, 0.0)
        assert gc.get_freeze_count() > 1000

    asyncio.run(run())
