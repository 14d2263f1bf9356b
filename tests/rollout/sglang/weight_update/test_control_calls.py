"""Control calls to a fake engine that does not answer."""

import asyncio

import pytest

from megarl.errors import WeightSyncError
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.sglang.weight_update.control_calls import ControlCalls
from tests.rollout.clock import in_virtual_time

SECONDS = 10


class Host:
    spec = EngineSpec(model_path="", answer_timeout_seconds=SECONDS)

    async def call(self, work):
        return await work


class Calls(ControlCalls):
    """Fake SGLang that answers as soon as `answers` is set."""

    def __init__(self):
        super().__init__(Host(), None)
        self.answers, self.sent = asyncio.Event(), []

    async def _wait_for_answer(self, what):
        self.sent.append(what)
        await self.answers.wait()
        return True, ""

    async def _pause(self):
        await self._wait_for_answer("pause")

    async def _flush(self):
        await self._wait_for_answer("flush")
        raise WeightSyncError("requests were still running")

    async def _begin(self, selector):
        await self._wait_for_answer("begin")
        self._begun = True

    async def _end(self):
        if self._begun:
            await self._wait_for_answer("end")
            self._begun = False


@in_virtual_time
async def test_late_answer_is_waited_for_and_used():
    calls = Calls()
    with pytest.raises(WeightSyncError, match=r"the engine did not answer begin_weight_update within 10 s"):
        await calls.begin()
    assert calls.has_pending
    with pytest.raises(WeightSyncError, match=r"has not answered begin_weight_update yet, .* restarted"):
        await calls.pause()
    assert calls.sent == ["begin"]
    calls.answers.set()
    await calls.begin()
    assert calls.sent == ["begin", "end", "begin"]
    assert not calls.has_pending


@in_virtual_time
async def test_late_failure_belongs_to_the_call_that_timed_out():
    calls = Calls()
    with pytest.raises(WeightSyncError, match="did not answer flush_cache"):
        await calls.flush()
    calls.answers.set()
    await calls.pause()
    with pytest.raises(WeightSyncError, match="still running"):
        await calls.flush()


@in_virtual_time
async def test_call_of_a_cancelled_caller_is_waited_for():
    calls = Calls()
    gone = asyncio.create_task(calls.begin())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert calls.has_pending
    asyncio.get_running_loop().call_later(SECONDS / 2, calls.answers.set)
    await calls.end()
    assert calls.sent == ["begin", "end"]
