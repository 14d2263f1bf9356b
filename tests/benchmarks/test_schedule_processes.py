"""The scripted engine: slots, pauses and versions. `python -m benchmarks.schedule --processes` runs it in Ray."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.schedule.processes import ScriptedEngine
from tests.virtual_time import run_in_virtual_time


def test_samples_share_slots_and_stop_while_weights_are_pushed() -> None:
    async def run() -> tuple[dict[int, float], dict[int, float], float]:
        engine = ScriptedEngine(num_slots=2)
        first, second = asyncio.create_task(engine.generate([0.4, 0.4])), asyncio.create_task(engine.generate([0.4]))
        await asyncio.sleep(0.2)
        await engine.push(1, seconds=0.5)
        return await first, await second, asyncio.get_running_loop().time()

    first, second, seconds = run_in_virtual_time(run())
    assert first == {
        0: pytest.approx(0.4),
        1: pytest.approx(0.4),
    }
    assert sum(first.values()) == pytest.approx(0.8)
    assert second == {1: pytest.approx(0.4)}
    assert seconds == pytest.approx(1.3)
