"""What trainer ranks and rollout workers hear of an engine that does not answer."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayError

from megarl.errors import LostEngineError, MegarlError, WeightSyncError, WorkerError
from megarl.groups import remote_engine
from megarl.groups.remote_engine import EngineRankSink, EngineSink, RemoteEngine


class Method:
    def remote(self, *_: Any) -> str:
        return "ref"


class Handle:
    """Of an actor that has got the call."""

    invoke = Method()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (WeightSyncError("norm is no parameter"), "engine 1{rank}: norm is no parameter"),
        (WorkerError("it died"), "engine 1{rank} did not load a bucket of weights: it died"),
    ],
)
def test_the_engine_is_named(error: MegarlError, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(refs: list[Any], **_: Any) -> None:
        assert refs == ["ref"]
        raise error

    monkeypatch.setattr(remote_engine, "wait_all", fail)
    boxes = EngineRankSink(Handle(), "engine 1", 3, 1.0).load_boxes(0, None)
    whole = EngineSink(Handle(), "engine 1", 1.0).load(None)  # type: ignore[arg-type]
    for wait, rank in ((boxes, " rank 3"), (whole, "")):
        with pytest.raises(WeightSyncError) as raised:
            wait()
        assert str(raised.value) == says.format(rank=rank)
        assert raised.value.__cause__ is error


class Answers:
    """Of an actor, one a call: values, or what Ray raises."""

    def __init__(self, *answers: Any) -> None:
        self.left, self.invoke = list(answers), SimpleNamespace(remote=self._invoke)

    def _invoke(self, *_: Any) -> Any:
        future: Future[Any] = Future()
        answer = self.left.pop(0)
        if isinstance(answer, RayError):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return SimpleNamespace(future=lambda: future)


def lost_on_its_way() -> list[RayError]:
    return [ActorUnavailableError("the connection was reset", b"x" * 16), ObjectLostError("0" * 56, None, "")]


def test_an_answer_that_was_lost_on_its_way_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "RETRY_SECONDS", 0.0)
    handle = Answers(*lost_on_its_way(), ["completion"])
    assert asyncio.run(RemoteEngine(handle, "engine 1").generate_many([])) == ["completion"]  # type: ignore[comparison-overlap]
    assert handle.left == []


def test_an_engine_is_lost_once_ray_knows_that_it_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "RETRY_SECONDS", 0.0)
    handle = Answers(*lost_on_its_way(), ActorDiedError())
    with pytest.raises(LostEngineError, match="generate_many: engine 1 died"):
        asyncio.run(RemoteEngine(handle, "engine 1").generate_many([]))
