"""The benchmark of the gateway runs, and reports every turn."""

from __future__ import annotations

import asyncio

from benchmarks.gateway.measure import Load, measure


def test_turns_take_longer_than_the_engine_alone() -> None:
    found = asyncio.run(measure(Load(num_sessions=4, num_turns=2, engine_seconds=0.05)))
    assert 0 < found["added_ms_p50"] <= found["added_ms_p99"]
    assert found["cpu_ms_per_turn"] > 0
