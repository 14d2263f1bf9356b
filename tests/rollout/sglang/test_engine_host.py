"""What tells an engine that stands still from one that is busy."""

import asyncio
from types import SimpleNamespace

import pytest

from megarl.rollout.sglang import engine_host
from megarl.rollout.sglang.engine_host import EngineHost


class Manager:
    """In the place of SGLang's front: schedulers answer once `gate` is set."""

    def __init__(self):
        self.gate, self.asked = asyncio.Event(), 0

    async def get_internal_state(self):
        self.asked += 1
        await self.gate.wait()


@pytest.fixture
def hosted(monkeypatch):
    """A host whose two schedulers have used `spent` seconds of processor time."""
    monkeypatch.setattr(engine_host, "BEAT_SECONDS", 0.01)
    host = EngineHost(SimpleNamespace(log_dir=None))
    host._engine = SimpleNamespace(tokenizer_manager=Manager())
    host.spent = [1.0, 1.0]
    monkeypatch.setattr(host, "_processor_seconds", lambda: list(host.spent))
    return host


async def beats(host, seconds=0.1):
    beat = asyncio.create_task(host._beat())
    done, _ = await asyncio.wait([beat], timeout=seconds)
    beat.cancel()
    return bool(done)


def test_an_engine_that_answers_lives(hosted):
    async def main():
        hosted.tokenizer_manager.gate.set()
        assert await beats(hosted)

    asyncio.run(main())


def test_one_that_works_without_answering_lives_if_all_its_schedulers_do(hosted):
    async def main():
        beat = asyncio.create_task(hosted._beat())
        await asyncio.sleep(0.05)
        hosted.spent = [2.0, 1.0]
        await asyncio.sleep(0.05)
        assert not beat.done()
        hosted.spent = [2.0, 1.5]
        await asyncio.wait_for(beat, 5)

    asyncio.run(main())


def test_one_that_stands_still_gives_no_sign_and_is_asked_once(hosted):
    async def main():
        assert not await beats(hosted)
        assert not await beats(hosted)
        assert hosted.tokenizer_manager.asked == 1
        hosted.tokenizer_manager.gate.set()
        assert await beats(hosted)

    asyncio.run(main())


def test_one_that_works_for_too_long_without_an_answer_gives_no_sign_until_it_answers(hosted, monkeypatch):
    async def spin():
        while True:
            hosted.spent = [spent + 1 for spent in hosted.spent]
            await asyncio.sleep(0.005)

    async def main():
        spinning = asyncio.create_task(spin())
        assert await beats(hosted)
        monkeypatch.setattr(engine_host, "BUSY_SECONDS", 0.05)
        await asyncio.sleep(0.1)
        assert not await beats(hosted)
        hosted.tokenizer_manager.gate.set()
        assert await beats(hosted)
        hosted.tokenizer_manager.gate.clear()
        assert await beats(hosted)  # another question
        spinning.cancel()

    asyncio.run(main())
