"""The messages that the schedulers of an engine get; completions are compared in the tests of the engine."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from megarl.rollout.sglang.batched_requests import make_tokenizer_manager_class


@dataclass
class Request:
    """SGLang's message for a request."""

    rid: str
    time_stats: str = "encoded"


@dataclass
class Batch:
    """SGLang's message for several requests."""

    batch: list[Request]


class TokenizerManager:
    """Sends messages as SGLang's does: an encoded field of a request is decoded again after sending it."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.control = self._dispatch_to_scheduler  # kept by SGLang before the engine has started

    async def generate(self, rid: str) -> None:
        request = Request(rid)
        self._dispatch_to_scheduler(request)
        request.time_stats = "decoded"

    def _dispatch_to_scheduler(self, obj: object) -> None:
        self.sent.append(obj)

    async def _async_dispatch_to_scheduler(self, obj: object) -> None:
        self.sent.append(obj)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    messages, managers = ModuleType("io_struct"), ModuleType("tokenizer_manager")
    vars(messages).update(TokenizedGenerateReqInput=Request, BatchTokenizedGenerateReqInput=Batch)
    vars(managers).update(TokenizerManager=TokenizerManager)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.tokenizer_manager", managers)
    return make_tokenizer_manager_class()()


def test_requests_of_one_iteration_are_one_message(manager: Any) -> None:
    async def main() -> None:
        await asyncio.gather(*(manager.generate(f"a{i}") for i in range(3)))
        await asyncio.gather(*(manager.generate(f"b{i}") for i in range(2)))
        await manager.generate("c")
        await asyncio.sleep(0)

    asyncio.run(main())
    expected = [Batch([Request("a0"), Request("a1"), Request("a2")]), Batch([Request("b0"), Request("b1")])]
    assert manager.sent == [*expected, Request("c")]


@pytest.mark.parametrize("is_async", [False, True])
def test_other_messages_follow_the_requests_before_them(manager: Any, is_async: bool) -> None:
    async def main() -> None:
        await asyncio.gather(manager.generate("a"), manager.generate("b"))
        if is_async:
            await manager._async_dispatch_to_scheduler("abort")
        else:
            manager.control("abort")
        await manager.generate("c")
        await asyncio.sleep(0)

    asyncio.run(main())
    assert manager.sent == [Batch([Request("a"), Request("b")]), "abort", Request("c")]
