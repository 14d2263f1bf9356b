"""The queue against a sorted list and against matching."""

from __future__ import annotations

from random import Random

import pytest

from megarl.schedule.deadline_queue import DeadlineQueue
from tests.schedule.matching import can_match


def earliest(groups: dict[int, tuple[int, bool]], num: int) -> list[int]:
    finished = sorted((deadline, ordinal) for ordinal, (deadline, is_finished) in groups.items() if is_finished)
    return [ordinal for _, ordinal in finished[:num]]


@pytest.mark.parametrize("seed", range(20))
def test_events_keep_the_order(seed: int) -> None:
    random, queue = Random(seed), DeadlineQueue(groups_per_step=2)
    groups: dict[int, tuple[int, bool]] = {}
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
        in_order = sorted((deadline, ordinal) for ordinal, (deadline, _) in groups.items())
        assert queue.earliest_finished(num) == earliest(groups, num)
        assert queue.num_finished == sum(is_finished for _, is_finished in groups.values())
        assert len(queue) == len(groups)
        first = [groups[ordinal][1] for _, ordinal in in_order[:num]]
        assert queue.are_first_finished(num) == (len(first) == num and all(first))


def test_slack_is_the_number_of_groups_that_can_be_added() -> None:
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
