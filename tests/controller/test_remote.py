"""What a trainer rank hears of an engine that does not take its weights."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.controller import remote
from megarl.controller.remote import EngineRankSink, EngineSink
from megarl.errors import MegarlError, WeightSyncError, WorkerError


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
        (WorkerError("it died"), "engine 1{rank} did not take a bucket of weights: it died"),
    ],
)
def test_the_engine_is_named(error: MegarlError, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(refs: list[Any], **_: Any) -> None:
        assert refs == ["ref"]
        raise error

    monkeypatch.setattr(remote, "wait_all", fail)
    boxes = EngineRankSink(Handle(), "engine 1", 3, 1.0).load_boxes(0, None)
    whole = EngineSink(Handle(), "engine 1", 1.0).load(None)  # type: ignore[arg-type]
    for wait, rank in ((boxes, " rank 3"), (whole, "")):
        with pytest.raises(WeightSyncError) as raised:
            wait()
        assert str(raised.value) == says.format(rank=rank)
        assert raised.value.__cause__ is error
