"""The rules of a schedule, one at a time."""

import doctest
from importlib import import_module

import pytest

from megarl.run.schedule.events import Outcome
from megarl.run.schedule.schedule import WAIT_FREE_STEPS, Schedule, place
from megarl.run.schedule.settings import Late, SchedulePolicy, Update
from tests.errors import expect_error

MODULES = ("settings", "schedule")


def make(lookahead, max_staleness, *, late=Late.WAIT, num_steps=None):
    policy = SchedulePolicy(lookahead=lookahead, max_staleness=max_staleness, late=late, update=Update.RETRACT)
    return Schedule(policy, 2, num_steps=num_steps)


def finish_all(schedule):
    for group in schedule.state().groups:
        if not group.is_finished:
            schedule.finish(group.ordinal)


def train(schedule):
    batch = schedule.pick()
    assert batch is not None
    schedule.lease(batch)
    schedule.push()
    return batch


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module):
    results = doctest.testmod(import_module(f"megarl.run.schedule.{module}"))
    assert results.attempted
    assert not results.failed


def test_one_step_off_trains_in_order_and_drains():
    policy = SchedulePolicy(lookahead=1, max_staleness=1, update=Update.DRAIN, in_order=True)
    schedule = Schedule(policy, 2, num_steps=3)
    assert place(5, groups_per_step=2) == (3, 1)
    schedule.admit(4)
    for ordinal in (2, 3, 1):
        schedule.finish(ordinal)
        assert schedule.pick() is None
    schedule.finish(0)
    assert train(schedule) == (0, 1)
    assert schedule.admit(schedule.capacity).ordinals == (4, 5)
    schedule.lease((2, 3))
    assert schedule.group_staleness() == {1: 2}
    metrics = schedule.metrics()
    assert (metrics["schedule/unfinished"], metrics["schedule/finished"]) == (2, 0)
    assert metrics["schedule/staleness_mean"] == metrics["schedule/staleness_max"] == 1
    assert not schedule.can_push
    with expect_error(ValueError, "2", "unfinished", "cannot"):
        schedule.push()
    finish_all(schedule)
    assert schedule.can_push


@pytest.mark.parametrize("is_short", [False, True])
def test_a_leased_batch_counts_until_its_push_and_a_short_one_as_a_full_one(is_short):
    schedule = make(1, 1)
    schedule.admit(4)
    finish_all(schedule)
    with expect_error(ValueError, "1", "(0,)", "2", "cannot", "groups"):
        schedule.lease((0,))
    if is_short:
        schedule.remove(1, Outcome.FILTERED)
    schedule.lease((0,) if is_short else (0, 1))
    assert schedule.capacity == 0
    with expect_error(ValueError, "1", "0", "admitted", "capacity"):
        schedule.admit(1)
    schedule.push()
    assert schedule.capacity == 2


def test_finished_groups_that_wait_take_up_places_of_an_adapted_lookahead():
    schedule = Schedule(SchedulePolicy(lookahead=2, max_staleness=2, adapt_lookahead=True), 2)
    schedule.admit(schedule.capacity)
    finish_all(schedule)
    train(schedule)
    assert (schedule.num_finished, schedule.capacity) == (4, 0)  # without adapting: 2
    train(schedule)
    assert (schedule.num_finished, schedule.capacity) == (2, 4)  # a batch is ready, and no other group waits
    schedule.admit(4)
    schedule.finish(8)
    schedule.lease(schedule.pick() or ())
    assert (schedule.num_finished, schedule.num_unfinished, schedule.capacity) == (1, 3, 0)
    schedule.push()
    assert schedule.capacity == 2


def test_a_lookahead_adapts_once_no_step_has_waited_for_some_time():
    schedule = Schedule(SchedulePolicy(lookahead=2, max_staleness=2, adapt_lookahead=True), 1)
    schedule.mark_waiting()  # the first step has to
    lookaheads = []
    for step in range(1, 2 * WAIT_FREE_STEPS + 2):
        schedule.admit(schedule.capacity)
        finish_all(schedule)
        if step == WAIT_FREE_STEPS:
            schedule.mark_waiting()
        schedule.lease(schedule.pick() or ())
        lookaheads.append(schedule.lookahead)
        schedule.push()
    before, after = lookaheads[: WAIT_FREE_STEPS - 1], lookaheads[WAIT_FREE_STEPS - 1 : -1]
    assert before[0] == min(before) == 0
    assert set(after) == {2}
    assert lookaheads[-1] < 2


def test_a_step_waits_for_a_group_before_it_is_due():
    """Three groups of version 0 are left after step 1, and two places until their deadline."""
    schedule = make(2, 2)
    schedule.admit(6)
    for ordinal in (3, 4, 5):
        schedule.finish(ordinal)
    assert train(schedule) == (3, 4)
    assert schedule.admit(2).ordinals == (6, 7)
    schedule.finish(6)
    assert schedule.overdue_step == 3
    assert schedule.pick() is None
    schedule.finish(2)
    assert train(schedule) == (2, 5)


def test_removed_groups_are_replaced():
    schedule = make(0, 0)
    schedule.admit(2)
    schedule.finish(0)
    schedule.remove(0, Outcome.FILTERED)
    schedule.remove(1, Outcome.FAILED)
    assert schedule.admit(schedule.capacity).ordinals == (2, 3)
    finish_all(schedule)
    assert train(schedule) == (2, 3)
    counts = schedule.state().counts
    assert (counts.trained, counts.filtered, counts.failed, counts.dropped) == (2, 1, 1, 0)
    metrics = {name.removeprefix("schedule/"): value for name, value in schedule.metrics().items()}
    assert metrics == {"unfinished": 0, "finished": 0, "filtered": 1, "failed": 1, "dropped": 0}


def test_masking_never_waits():
    schedule = make(1, 1, late=Late.MASK)
    schedule.admit(4)
    for step in range(3):
        for ordinal in range(2 * step + 1, 2 * step + 3):
            schedule.finish(ordinal)
        train(schedule)
        schedule.admit(schedule.capacity)
    schedule.finish(0)
    schedule.finish(7)
    assert schedule.pick() == (0, 7)  # the late group comes first
    schedule.lease((0, 7))
    assert schedule.group_staleness() == {3: 1, 1: 1}
    assert schedule.policy.oldest_version(schedule.step) == 2


def test_dropped_groups_are_reported_and_replaced():
    schedule = make(1, 1, late=Late.DROP)
    schedule.admit(4)
    schedule.finish(1)
    schedule.finish(2)
    train(schedule)
    schedule.admit(2)
    schedule.finish(4)
    schedule.finish(5)
    schedule.lease(schedule.pick() or ())
    assert schedule.push().dropped == (0, 3)
    assert not schedule.is_unfinished(0)
    assert schedule.capacity == 4
    assert schedule.state().counts.dropped == 2


def test_wrong_events_are_refused():
    schedule = make(1, 1)
    schedule.admit(4)
    schedule.finish(0)
    with expect_error(ValueError, "0", "unfinished", "cannot"):
        schedule.finish(0)
    with expect_error(ValueError, "0", "-1", "admitted", "version"):
        schedule.finish(1, oldest=-1)
    with expect_error(ValueError, "9", "removed", "cannot"):
        schedule.remove(9, Outcome.FAILED)
    with expect_error(ValueError, "finished", "groups"):
        schedule.lease((0, 1))
    with expect_error(ValueError, "1", "cannot", "pushed"):
        schedule.push()
    schedule.finish(1)
    schedule.lease((0, 1))
    with expect_error(ValueError, "1", "already", "batch"):
        schedule.lease((0, 1))
    with expect_error(ValueError, "groups_per_step", "1", "0"):
        Schedule(SchedulePolicy(), 0)
