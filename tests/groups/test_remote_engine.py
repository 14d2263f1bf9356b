"""Errors that trainer ranks and rollout workers receive from remote engines, and retries of lost answers."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayError

from megarl.errors import LostEngineError, MegarlError, WeightSyncError, WorkerError
from megarl.groups import remote_engine
from megarl.groups.remote_engine import EngineSink, RemoteEngine


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WeightSyncError("norm is no parameter"), "engine 1: norm is no parameter"),
        (WorkerError("it died"), "engine 1 did not load a bucket of weights: it died"),
    ],
)
def test_sink_errors_name_the_engine(error: MegarlError, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(refs: list[Any], **_: Any) -> None:
        assert refs == ["ref"]
        raise error

    monkeypatch.setattr(remote_engine, "wait_all", fail)
    handle: Any = SimpleNamespace(invoke=SimpleNamespace(remote=lambda *_: "ref"))
    wait = EngineSink(handle, "engine 1", 1.0).load(None)  # type: ignore[arg-type]
    with pytest.raises(WeightSyncError) as raised:
        wait()
    assert str(raised.value) == message
    assert raised.value.__cause__ is error


def ended_future(answer: Any) -> Future[Any]:
    """Return a future with this result, or with this exception of Ray."""
    future: Future[Any] = Future()
    if isinstance(answer, RayError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    return future


class FakeActor:
    """An actor that answers each call with the next value or Ray error."""

    def __init__(self, *answers: Any) -> None:
        self.left, self.invoke = list(answers), SimpleNamespace(remote=self._invoke)

    def _invoke(self, *_: Any) -> Any:
        future = ended_future(self.left.pop(0))
        return SimpleNamespace(future=lambda: future)


def lost_answer_errors() -> list[RayError]:
    return [ActorUnavailableError("the connection was reset", b"x" * 16), ObjectLostError("0" * 56, None, "")]


def test_call_is_retried_if_the_answer_was_lost_but_not_on_a_dead_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "RETRY_SECONDS", 0.0)
    handle = FakeActor(*lost_answer_errors(), ["completion"])
    assert asyncio.run(RemoteEngine(handle, "engine 1").generate_many([])) == ["completion"]  # type: ignore[comparison-overlap]
    assert handle.left == []
    handle = FakeActor(*lost_answer_errors(), ActorDiedError())
    with pytest.raises(LostEngineError, match="generate_many: engine 1 died"):
        asyncio.run(RemoteEngine(handle, "engine 1").generate_many([]))
