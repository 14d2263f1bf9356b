"""20,000 adversarial schedules: none trains a token above the cap, none gets stuck, no group is lost or doubled."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.schedule.policy import Late
from tests.schedule.adversary import Case, Run, random_case

NUM_CASES = 20_000
NUM_CONTROL_CASES = 1_000
MIN_FAILURES = 0.3
"""Share of the control's cases that must be above the cap."""


def run(case: Case, random: Random) -> Run:
    result = Run(case, random).finish()
    assert not result.stuck, case
    assert result.lost_or_doubled() == [], case
    return result


@pytest.mark.parametrize("part", range(2))
def test_no_token_is_above_the_cap_and_no_group_is_lost(part: int) -> None:
    seen = Counter[str]()
    for seed in range(part, NUM_CASES, 2):
        random = Random(seed)
        case = random_case(random)
        result = run(case, random)
        assert result.excess <= 0, (seed, case)
        seen["kills"] += result.num_kills
        seen["removed"] += len(result.removed)
        seen["at the cap"] += result.excess == 0 < case.policy.max_staleness
        seen["adapted"] += case.policy.adapt_lookahead and case.policy.lookahead > 0
    assert min(seen.values()) > NUM_CASES / 10, seen  # the cases are no easy ones


def test_the_gate_alone_exceeds_the_cap() -> None:
    """With `late: mask`, a step never waits for the deadline rule; nothing else differs."""
    above = 0
    for seed in range(NUM_CONTROL_CASES):
        random = Random(seed)
        case = random_case(random)
        result = run(replace(case, policy=replace(case.policy, late=Late.MASK, in_order=False)), random)
        above += result.excess > 0
    assert above >= MIN_FAILURES * NUM_CONTROL_CASES


def test_dropped_groups_are_replaced_and_none_is_above_the_cap() -> None:
    dropped = 0
    for seed in range(NUM_CONTROL_CASES):
        random = Random(seed)
        case = random_case(random)
        case = replace(case, policy=replace(case.policy, late=Late.DROP, in_order=False))
        result = run(case, random)
        assert result.excess <= 0, (seed, case)
        dropped += result.schedule.state().counts.dropped
    assert dropped > NUM_CONTROL_CASES / 10


@settings(max_examples=50)
@given(random=st.randoms(use_true_random=False))
def test_smallest_failing_schedule(random: Random) -> None:
    """The same on few cases, which hypothesis shrinks when one fails."""
    case = random_case(random)
    assert run(case, random).excess <= 0
