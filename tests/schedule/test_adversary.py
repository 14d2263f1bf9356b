"""Adversarial schedules: none trains a token above the cap, none gets stuck, no group is lost or doubled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

import pytest

from megarl.schedule.policy import Late
from tests.schedule.adversary import Case, Run, random_case

NUM_CASES, NUM_SLOW_CASES = 4_000, 20_000
NUM_CONTROL_CASES = 1_000
MIN_FAILURES = 0.3
"""Share of the control's cases that must be above the cap."""


def run_cases(seeds: Iterable[int], late: Late | None = None) -> Iterator[tuple[int, Case, Run]]:
    """Yield seed, case and run of random cases, with `late` instead of their own rule for late groups."""
    for seed in seeds:
        random = Random(seed)
        case = random_case(random)
        if late is not None:
            case = replace(case, policy=replace(case.policy, late=late, in_order=False))
        result = Run(case, random).finish()
        assert not result.stuck, (seed, case)
        assert result.lost_or_doubled() == [], (seed, case)
        yield seed, case, result


@pytest.mark.parametrize(
    "seeds", [range(NUM_CASES), pytest.param(range(NUM_CASES, NUM_SLOW_CASES), marks=pytest.mark.slow)], ids=str
)
def test_no_token_is_above_the_cap_and_no_group_is_lost(seeds: range) -> None:
    seen = Counter[str]()
    for seed, case, result in run_cases(seeds):
        assert result.excess <= 0, (seed, case)
        seen["kills"] += result.num_kills
        seen["removed"] += len(result.removed)
        seen["at the cap"] += result.excess == 0 < case.policy.max_staleness
        seen["adapted"] += case.policy.adapt_lookahead and case.policy.lookahead > 0
    assert min(seen.values()) > len(seeds) / 5, seen  # the cases are no easy ones


def test_the_gate_alone_exceeds_the_cap() -> None:
    """With `late: mask`, a step never waits for the deadline rule; nothing else differs."""
    above = 0
    for _, _, result in run_cases(range(NUM_CONTROL_CASES), Late.MASK):
        above += result.excess > 0
    assert above >= MIN_FAILURES * NUM_CONTROL_CASES


def test_dropped_groups_are_replaced_and_none_is_above_the_cap() -> None:
    dropped = 0
    for seed, case, result in run_cases(range(NUM_CONTROL_CASES), Late.DROP):
        assert result.excess <= 0, (seed, case)
        dropped += result.schedule.state().counts.dropped
    assert dropped > NUM_CONTROL_CASES / 10
