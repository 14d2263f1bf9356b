"""Lookahead and cap that a tail needs, and the staleness of tokens."""

import pytest

from benchmarks.schedule.cases import Case
from benchmarks.schedule.simulate import simulate
from benchmarks.schedule.workload import TAILS, Workload
from megarl.run.schedule.settings import Late, SchedulePolicy, TailStats, token_staleness
from tests.errors import expect_error

TOLERANCE = 0.02
"""How much longer than the bound steps may take with the recommended settings."""


def test_needed_settings_and_warnings():
    tail = TailStats.of([50.0, 100.0, 450.0], step_seconds=100, train_seconds=80)
    assert (tail.mean_steps, tail.max_steps, tail.train_steps) == (2.0, 4.5, 0.8)
    assert (tail.needed_lookahead, tail.needed_staleness) == (3, 5)
    assert tail.line == (
        "groups take 2.00 steps on average and 4.50 at most: asynchronous steps need lookahead 3 and max_staleness 5"
    )
    assert not list(tail.warnings(SchedulePolicy(lookahead=3, max_staleness=5)))
    lookahead, staleness = tail.warnings(SchedulePolicy(lookahead=2, max_staleness=2))
    assert lookahead.startswith("schedule.lookahead needs 3 to keep the engines busy, got 2")
    assert staleness.startswith("schedule.max_staleness needs 5 so that no step waits for a group, got 2")
    assert "schedule.late: mask" in staleness
    assert not list(tail.warnings(SchedulePolicy(lookahead=3, max_staleness=3, late=Late.MASK)))


@pytest.mark.parametrize(("seconds", "step_seconds"), [([], 1.0), ([1.0], 0.0)])
def test_a_tail_needs_groups_and_steps(seconds, step_seconds):
    with expect_error(ValueError, "0", "longer", "needs"):
        TailStats.of(seconds, step_seconds=step_seconds, train_seconds=1.0)


@pytest.mark.parametrize("name", list(TAILS))
def test_needed_settings_suffice_and_smaller_ones_do_not(name):
    """The tail is measured under `sync`, and the settings are used in an asynchronous run of the same groups."""
    workload = Workload(tail=TAILS[name], num_steps=100)
    sync = simulate(Case(policy=SchedulePolicy()), workload).group_seconds
    tail = TailStats.of(sync, step_seconds=workload.bound, train_seconds=workload.train_seconds)
    policy = SchedulePolicy(lookahead=tail.needed_lookahead, max_staleness=tail.needed_staleness)
    assert step(policy, workload) <= 1 + workload.pause_seconds + TOLERANCE
    lookahead = tail.needed_lookahead - 2
    assert step(SchedulePolicy(lookahead=lookahead, max_staleness=tail.needed_staleness), workload) > 1.2
    staleness = max(policy.lookahead, tail.needed_staleness // 2)
    assert step(SchedulePolicy(lookahead=policy.lookahead, max_staleness=staleness), workload) > 1.05


def step(policy, workload):
    return simulate(Case(policy=policy), workload).report("", "").step_over_bound


def test_token_staleness():
    tokens = token_staleness(9, {8: 10, 4: 30, 6: 20, 3: 40}, max_staleness=4)
    assert dict(tokens.num_tokens) == {0: 10, 2: 20, 4: 30}
    assert (tokens.num_masked, tokens.masked_fraction, tokens.worst) == (40, 0.4, 4)
    assert tokens.mean == pytest.approx((20 * 2 + 30 * 4) / 60)
    assert tokens.metrics() == {
        "staleness/mean": pytest.approx(8 / 3),
        "staleness/max": 4,
        "staleness/masked": 0.4,
        "staleness/share_0": pytest.approx(1 / 6),
        "staleness/share_2": pytest.approx(1 / 3),
        "staleness/share_4": 0.5,
    }
    nothing = token_staleness(9, {2: 5}, max_staleness=4)
    assert (nothing.mean, nothing.worst, nothing.masked_fraction) == (0, 0, 1)
