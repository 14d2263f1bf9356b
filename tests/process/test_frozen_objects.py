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


@pytest.mark.parametrize("kind", [WorkerHost, AsyncWorkerHost])
def test_a_worker_that_is_built_is_frozen_with_its_process(
    kind: type[WorkerHost | AsyncWorkerHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_host, "_read_process_info", lambda: None)  # in this process, outside of Ray
    host = kind({})
    if isinstance(host, AsyncWorkerHost):
        asyncio.run(host.build(Node, (), {}, 0.0))
    else:
        host.build("role", Node, (), {}, 0.0)
    assert gc.get_freeze_count() > 1000
