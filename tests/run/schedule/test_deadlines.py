"""Deadlines: the queue against sorted lists and matching, and every order of events of small schedules."""

from functools import cache
from itertools import combinations, product
from random import Random

import pytest

from megarl.run.schedule.schedule import DeadlineQueue, Schedule
from megarl.run.schedule.settings import SchedulePolicy, Update


def can_match(deadlines, step, groups_per_step):
    """Return whether each group can be given a place of its own in one of the steps from `step` to its deadline."""
    owner = {}

    def find_place(group, visited):
        for place in product(range(step, deadlines[group] + 1), range(groups_per_step)):
            if place not in visited:
                visited.add(place)
                if place not in owner or find_place(owner[place], visited):
                    owner[place] = group
                    return True
        return False

    return all(find_place(group, set()) for group in range(len(deadlines)))


@cache
def can_take_some_batch(groups, step, groups_per_step):
    """Return whether a batch of finished `groups`, (deadline, is finished), leaves all others a place in time."""
    finished = [i for i, (_, is_finished) in enumerate(groups) if is_finished]
    for batch in combinations(finished, groups_per_step):
        others = [deadline for i, (deadline, _) in enumerate(groups) if i not in batch]
        if can_match(others, step + 1, groups_per_step):
            return True
    return False


@pytest.mark.parametrize("seed", range(20))
def test_events_keep_the_order(seed):
    random, queue = Random(seed), DeadlineQueue(groups_per_step=2)
    groups = {}
    for _ in range(200):
        unfinished = [ordinal for ordinal, (_, is_finished) in groups.items() if not is_finished]
        action = random.random()
        if action < 0.5:
            ordinal, deadline = random.randrange(1000), random.randint(1, 6)
            if ordinal not in groups:
                queue.add(ordinal, deadline)
                groups[ordinal] = deadline, False
        elif action < 0.8 and unfinished:
            ordinal = random.choice(unfinished)
            queue.finish(ordinal, groups[ordinal][0])
            groups[ordinal] = groups[ordinal][0], True
        elif groups:
            ordinal = random.choice(list(groups))
            queue.remove(ordinal, groups.pop(ordinal)[0])
        num = random.randint(0, 4)
        in_order = sorted((deadline, ordinal, is_finished) for ordinal, (deadline, is_finished) in groups.items())
        finished = [ordinal for _, ordinal, is_finished in in_order if is_finished]
        assert queue.earliest_finished(num) == finished[:num]
        assert (queue.num_finished, len(queue)) == (len(finished), len(groups))
        first = [is_finished for _, _, is_finished in in_order[:num]]
        assert queue.are_first_finished(num) == (len(first) == num and all(first))


def test_slack_is_the_number_of_groups_that_can_be_added():
    random, found = Random(0), set()
    for _ in range(500):
        groups_per_step, deadlines = random.randint(1, 3), [random.randint(2, 5) for _ in range(random.randint(0, 8))]
        if not can_match(deadlines, 2, groups_per_step):
            continue
        queue, deadline = DeadlineQueue(groups_per_step), random.randint(1, 6)
        for ordinal, due in enumerate(deadlines):
            queue.add(ordinal, due)
        num = 0
        while can_match([*deadlines, *[deadline] * (num + 1)], 2, groups_per_step):
            num += 1
        assert queue.slack(deadline, step=1) == num
        found.add(num)
    assert len(found) > 5


NUM_GROUPS = 8


def replayed(policy, groups_per_step, actions):
    """Return the schedule after the actions."""
    schedule = Schedule(policy, groups_per_step, num_steps=NUM_GROUPS // groups_per_step)
    for name, *arguments in actions:
        getattr(schedule, name)(*arguments)
    return schedule


def possible_actions(schedule):
    actions = [("admit", 1)] if schedule.capacity else []
    actions += [("finish", group.ordinal) for group in schedule.state().groups if not group.is_finished]
    if (batch := schedule.pick()) is not None:
        actions.append(("lease", batch))
    return [*actions, ("push",)] if schedule.can_push else actions


def key_of(schedule):
    """Return what decides how a schedule continues, up to the names of groups admitted at the same version."""
    state = schedule.state()
    if schedule.policy.in_order:
        return state.version, state.next_ordinal, state.groups, state.leases
    groups = sorted((group.version, group.is_finished) for group in state.groups)
    leased = sorted(group.version for lease in state.leases for group in lease.groups)
    return state.version, state.next_ordinal, tuple(groups), tuple(leased)


def check_state(schedule, policy, groups_per_step):
    """Check the cap, and that a step waits if and only if every possible batch would make another group late."""
    state = schedule.state()
    for lease in state.leases:
        assert all(lease.step - 1 - group.version <= policy.max_staleness for group in lease.groups)
    assert len(state.groups) + groups_per_step * len(state.leases) <= (policy.lookahead + 1) * groups_per_step
    if state.leases or policy.in_order:
        return
    first_due = policy.max_staleness + 1 - schedule.step
    groups = sorted((group.version + first_due, group.is_finished) for group in state.groups)
    assert (schedule.pick() is not None) == can_take_some_batch(tuple(groups), 0, groups_per_step)


@pytest.mark.parametrize("groups_per_step", [1, 2])
@pytest.mark.parametrize(("lookahead", "max_staleness"), [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", [{}, {"adapt_lookahead": True}, {"update": Update.DRAIN, "in_order": True}])
def test_all_orders(lookahead, max_staleness, groups_per_step, kind):
    policy = SchedulePolicy(lookahead=lookahead, max_staleness=max_staleness, **kind)
    seen, paths, ends = set(), [()], 0
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
            assert state.version == NUM_GROUPS // groups_per_step
            assert state.counts.trained == NUM_GROUPS == state.next_ordinal
            assert not state.groups
            ends += 1
        paths += [(*path, action) for action in actions]
    assert ends
