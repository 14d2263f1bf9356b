"""Every order of events of small schedules: the cap holds, none gets stuck, and steps wait only where they must."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import pytest

from megarl.schedule.policy import SchedulePolicy, Update
from megarl.schedule.schedule import Schedule
from tests.schedule.matching import can_take_some_batch

NUM_GROUPS = 8
Action = tuple[str, int]

can_take_some_batch_of = cache(can_take_some_batch)


def replayed(policy: SchedulePolicy, groups_per_step: int, actions: tuple[Action, ...]) -> Schedule:
    """Return the schedule after the actions."""
    schedule = Schedule(policy, groups_per_step, num_steps=NUM_GROUPS // groups_per_step)
    for name, ordinal in actions:
        if name == "admit":
            schedule.admit(1)
        elif name == "finish":
            schedule.finish(ordinal)
        elif name == "lease":
            schedule.lease(schedule.pick() or ())
        else:
            schedule.push()
    return schedule


def possible_actions(schedule: Schedule) -> list[Action]:
    actions: list[Action] = [("admit", 0)] if schedule.capacity else []
    actions += [("finish", group.ordinal) for group in schedule.state().groups if not group.is_finished]
    if schedule.pick() is not None:
        actions.append(("lease", 0))
    if schedule.can_push:
        actions.append(("push", 0))
    return actions


def key_of(schedule: Schedule) -> Hashable:
    """Return what decides how a schedule goes on, up to the names of groups that were admitted at the same version."""
    state = schedule.state()
    if schedule.policy.in_order:
        return state.version, state.next_ordinal, state.groups, state.leases
    groups = sorted((group.version, group.is_finished) for group in state.groups)
    leased = sorted(group.version for lease in state.leases for group in lease.groups)
    return state.version, state.next_ordinal, tuple(groups), tuple(leased)


def check_state(schedule: Schedule, policy: SchedulePolicy, groups_per_step: int) -> None:
    """Check the cap, and that a step waits if and only if every possible batch would make another group late."""
    state = schedule.state()
    for lease in state.leases:
        assert all(lease.step - 1 - group.version <= policy.max_staleness for group in lease.groups)
    assert len(state.groups) + groups_per_step * len(state.leases) <= (policy.lookahead + 1) * groups_per_step
    if state.leases or policy.in_order:
        return
    first = schedule.step
    groups = tuple(
        sorted((group.version + policy.max_staleness + 1 - first, group.is_finished) for group in state.groups)
    )
    assert (schedule.pick() is not None) == can_take_some_batch_of(groups, 0, groups_per_step)


@pytest.mark.parametrize("groups_per_step", [1, 2])
@pytest.mark.parametrize(("lookahead", "max_staleness"), [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", [{}, {"adapt_lookahead": True}, {"update": Update.DRAIN, "in_order": True}])
def test_all_orders(lookahead: int, max_staleness: int, groups_per_step: int, kind: dict[str, Any]) -> None:
    policy = SchedulePolicy(lookahead=lookahead, max_staleness=max_staleness, **kind)
    num_steps = NUM_GROUPS // groups_per_step
    seen = set()
    paths: list[tuple[Action, ...]] = [()]
    ends = 0
    while paths:
        path = paths.pop()
        schedule = replayed(policy, groups_per_step, path)
        state, key = schedule.state(), key_of(schedule)
        if key in seen:
            continue
        seen.add(key)
        check_state(schedule, policy, groups_per_step)
        actions = possible_actions(schedule)
        if not actions:  # the end, or stuck
            assert state.version == num_steps
            assert state.counts.trained == NUM_GROUPS == state.next_ordinal
            assert not state.groups
            ends += 1
        paths += [(*path, action) for action in actions]
    assert ends
