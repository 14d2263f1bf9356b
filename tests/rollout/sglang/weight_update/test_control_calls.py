"""An engine that does not answer, without an engine."""

import asyncio

import pytest

from megarl.errors import WeightSyncError
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.sglang.weight_update.control_calls import UpdateCalls

SECONDS = 0.1


class Host:
    spec = EngineSpec(model_path="", answer_timeout_seconds=SECONDS)

    async def call(self, work):
        return await work


class Calls(UpdateCalls):
    """SGLang answers once `answers` is set."""

    def __init__(self):
        super().__init__(Host())
        self.answers, self.asked = asyncio.Event(), []

    async def _reach(self, what):
        self.asked.append(what)
        await self.answers.wait()
        return True, ""

    async def _pause(self):
        await self._reach("pause")

    async def _flush(self):
        await self._reach("flush")
        raise WeightSyncError("requests were still running")

    async def _begin(self):
        await self._reach("begin")
        self._begun = True

    async def _end(self):
        if self._begun:
            await self._reach("end")
            self._begun = False


def run(main):
    async def start():
        return await asyncio.wait_for(main(Calls()), 5)

    return asyncio.run(start())


def test_a_late_answer_is_waited_for_and_counts():
    async def main(calls):
        with pytest.raises(WeightSyncError, match=r"the engine did not answer begin_weight_update within 0\.1 s"):
            await calls.begin()
        assert calls.behind
        with pytest.raises(WeightSyncError, match=r"has not answered begin_weight_update yet, .* started anew"):
            await calls.pause()
        assert calls.asked == ["begin"]
        calls.answers.set()
        await calls.begin()
        assert calls.asked == ["begin", "end", "begin"]
        assert not calls.behind

    run(main)


def test_a_late_failure_belongs_to_the_call_that_was_given_up():
    async def main(calls):
        with pytest.raises(WeightSyncError, match="did not answer flush_cache"):
            await calls.flush()
        calls.answers.set()
        await calls.pause()
        with pytest.raises(WeightSyncError, match="still running"):
            await calls.flush()

    run(main)


def test_a_cancelled_caller_s_call_is_waited_for():
    async def main(calls):
        gone = asyncio.create_task(calls.begin())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert calls.behind
        asyncio.get_running_loop().call_later(SECONDS / 2, calls.answers.set)
        await calls.end()
        assert calls.asked == ["begin", "end"]

    run(main)
