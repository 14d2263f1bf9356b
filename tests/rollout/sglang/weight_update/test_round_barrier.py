"""The barrier for the boxes of one round."""

import asyncio

import pytest

from megarl.errors import WeightSyncError
from megarl.rollout.sglang.weight_update.round_barrier import RoundBarrier


def run(main, seconds=0.05, error=None):
    executed = []

    async def execute(index, parts):
        await asyncio.sleep(0)
        executed.append((index, parts))
        if error is not None:
            raise error

    async def start():
        await asyncio.wait_for(main(RoundBarrier(2, seconds, execute)), 5)

    asyncio.run(start())
    return executed


def test_round_is_executed_when_all_parts_have_arrived():
    async def main(barrier):
        first = asyncio.create_task(barrier.arrive(1, 0, "b"))
        ahead = asyncio.create_task(barrier.arrive(1, 1, None))
        await asyncio.sleep(0.01)
        assert not first.done()
        await barrier.arrive(0, 0, "a")
        await first
        await barrier.arrive(0, 1, "c")
        await ahead

    assert run(main) == [(0, ["a", "b"]), (1, ["c", None])]


def test_every_sender_gets_the_error():
    async def main(barrier):
        answers = await asyncio.gather(*(barrier.arrive(r, 0, None) for r in (0, 1)), return_exceptions=True)
        assert [str(a) for a in answers] == ["no", "no"]

    assert len(run(main, error=WeightSyncError("no"))) == 1


def test_missing_ranks_are_reported():
    async def main(barrier):
        with pytest.raises(WeightSyncError, match=r"round 3 .* TP rank 0 of 2 within 0\.05 s"):
            await barrier.arrive(1, 3, None)

    assert run(main) == []


def test_cancelled_sender_does_not_affect_others():
    async def main(barrier):
        gone = asyncio.create_task(barrier.arrive(0, 0, "a"))
        await asyncio.sleep(0)
        gone.cancel()
        await barrier.arrive(1, 0, "b")

    assert run(main) == [(0, ["a", "b"])]


def test_aborted_rounds_fail_and_a_part_must_arrive_once():
    async def main(barrier):
        waiting = asyncio.create_task(barrier.arrive(0, 0, None))
        await asyncio.sleep(0)
        with pytest.raises(WeightSyncError, match="round 0 of TP rank 0 arrived twice"):
            await barrier.arrive(0, 0, None)
        barrier.abort(WeightSyncError("closed"))
        with pytest.raises(WeightSyncError, match="closed"):
            await waiting
        await asyncio.sleep(0.1)

    assert run(main) == []
