"""CPU time of the events of a schedule with many open groups."""

from __future__ import annotations

import time
from random import Random

from megarl.schedule.policy import SchedulePolicy
from megarl.schedule.schedule import Schedule

LOOKAHEAD, MAX_STALENESS = 4, 8


def event_microseconds(num_open: int, num_steps: int, *, in_order: bool = False) -> float:
    """Return the CPU time of an event with `num_open` groups open, each followed by a `pick`, in microseconds."""
    policy = SchedulePolicy(lookahead=LOOKAHEAD, max_staleness=MAX_STALENESS, in_order=in_order)
    schedule, random = Schedule(policy, num_open // (LOOKAHEAD + 1)), Random(0)
    unfinished: list[int] = []
    start, num_events = time.thread_time(), 0
    while schedule.version < num_steps:
        while schedule.capacity:
            unfinished += schedule.admit(1).ordinals
            num_events += 1
        random.shuffle(unfinished)
        while (batch := schedule.pick()) is None:
            schedule.finish(unfinished.pop())
            num_events += 1
        schedule.lease(batch)
        schedule.push()
        num_events += 2
    return (time.thread_time() - start) / num_events * 1e6
