import asyncio

import pytest

from megarl.errors import WeightSyncError
from megarl.rollout.sglang.weight_update.round_barrier import Rendezvous


def run(main, seconds=0.05, error=None):
    executed = []

    async def execute(index, parts):
        await asyncio.sleep(0)
        executed.append((index, parts))
        if error is not None:
            raise error

    async def start():
        await asyncio.wait_for(main(Rendezvous(2, seconds, execute)), 5)

    asyncio.run(start())
    return executed


def test_a_round_is_executed_once_every_rank_s_part_is_there():
    async def main(rendezvous):
        first = asyncio.create_task(rendezvous.bring(1, 0, "b"))
        ahead = asyncio.create_task(rendezvous.bring(1, 1, None))
        await asyncio.sleep(0.01)
        assert not first.done()
        await rendezvous.bring(0, 0, "a")
        await first
        await rendezvous.bring(0, 1, "c")
        await ahead

    assert run(main) == [(0, ["a", "b"]), (1, ["c", None])]


def test_every_sender_hears_of_a_failure():
    async def main(rendezvous):
        answers = await asyncio.gather(*(rendezvous.bring(r, 0, None) for r in (0, 1)), return_exceptions=True)
        assert [str(a) for a in answers] == ["no", "no"]

    assert len(run(main, error=WeightSyncError("no"))) == 1


def test_the_ranks_that_are_missing_are_named():
    async def main(rendezvous):
        with pytest.raises(WeightSyncError, match=r"round 3 .* TP rank 0 of 2 within 0\.05 s"):
            await rendezvous.bring(1, 3, None)

    assert run(main) == []


def test_a_sender_that_is_gone_takes_nobody_with_it():
    async def main(rendezvous):
        gone = asyncio.create_task(rendezvous.bring(0, 0, "a"))
        await asyncio.sleep(0)
        gone.cancel()
        await rendezvous.bring(1, 0, "b")

    assert run(main) == [(0, ["a", "b"])]


def test_dismissed_rounds_fail_and_a_part_comes_once():
    async def main(rendezvous):
        waiting = asyncio.create_task(rendezvous.bring(0, 0, None))
        await asyncio.sleep(0)
        with pytest.raises(WeightSyncError, match="round 0 of TP rank 0 came twice"):
            await rendezvous.bring(0, 0, None)
        rendezvous.dismiss(WeightSyncError("closed"))
        with pytest.raises(WeightSyncError, match="closed"):
            await waiting
        await asyncio.sleep(0.1)

    assert run(main) == []
