"""Straggler detection."""

import threading
import time

import pytest

from megarl.cluster.workers.stragglers import (
    MAX_CALLS,
    CallLog,
    CallRecord,
    CallTime,
    Straggler,
    StragglerMonitor,
    slowest_by_phase,
    timed_call,
)


def make_step(*busy_seconds, method="train_step", wall=9.0, stages=()):
    """Return the records of one phase by rank; calls of all ranks take equally long."""
    return [
        [CallRecord("trainer", method, wall, seconds, stage)]
        for seconds, stage in zip(busy_seconds, stages or [0] * len(busy_seconds), strict=True)
    ]


def find_stragglers(records):
    return [one for one in slowest_by_phase(records) if one.is_significant]


def test_busiest_rank_is_found_although_calls_take_equally_long():
    (found,) = find_stragglers(make_step(1.0, 1.1, 0.9, 1.8))
    assert found == Straggler(phase="trainer.train_step", rank=3, seconds=1.8, median_seconds=1.0)
    assert found.ratio == pytest.approx(1.8)
    assert [one.rank for one in find_stragglers(make_step(2.0, 1.0))] == [0]


@pytest.mark.parametrize(
    "busy_seconds",
    [
        (1.0, 1.1, 1.29),
        (0.001, 0.002, 0.09),  # 45 times the median, but a negligible difference
        (5.0,),  # no other rank waits
        (1.0, 1.0, 1.35, 1.35, 1.35),  # as slow as the median
        (0.0, 0.0, 1.0),  # the others are not busy in it
    ],
)
def test_insignificant_differences_are_ignored(busy_seconds):
    assert find_stragglers(make_step(*busy_seconds)) == []


def test_calls_add_up_within_a_phase_and_not_across():
    twice = [
        a + b + c
        for a, b, c in zip(make_step(1, 1, 1), make_step(1, 1, 3), make_step(2, 1, 1, method="logprobs"), strict=True)
    ]
    found = {one.phase: (one.rank, one.seconds, one.median_seconds) for one in find_stragglers(twice)}
    assert found == {"trainer.train_step": (2, 4, 2), "trainer.logprobs": (0, 2, 1)}


def test_ranks_are_compared_within_their_pipeline_stage():
    assert [one.rank for one in find_stragglers(make_step(1.0, 1.0, 2.0, 2.1))] == [3]
    assert find_stragglers(make_step(1.0, 1.0, 2.0, 2.1, stages=(0, 0, 1, 1))) == []
    assert [one.rank for one in find_stragglers(make_step(1.0, 1.5, 2.0, 2.1, stages=(0, 0, 1, 1)))] == [1]
    assert find_stragglers(make_step(1.0, 2.0, stages=(0, 1))) == []


def test_persistent_straggler_is_reported_once():
    messages = []
    monitor = StragglerMonitor(["n1", "n1", "n2", "n2"], messages.append)
    slow, even = make_step(1.0, 1.0, 1.0, 1.8), make_step(1.0, 1.0, 1.0, 1.0)
    for _ in range(4):
        assert monitor.step(slow) == {"straggler/trainer.train_step_ratio": pytest.approx(1.8)}
    monitor.step(even)
    monitor.step(make_step(1.8, 1.0, 1.0, 1.0))
    for _ in range(4):
        monitor.step(slow)
    assert messages == []
    for _ in range(20):
        monitor.step(slow)
    assert messages == [
        "trainer rank 3 (node n2) was busy 1.8 times as long as the median in train_step, for 5 steps in a row"
    ]
    assert monitor.step(make_step(0.001, 0.002, 0.001, 0.001)) == {}


def test_only_cpu_time_of_the_calling_thread_is_busy_time():
    def burn(seconds):
        ends = time.thread_time() + seconds
        while time.thread_time() < ends:
            pass

    class Worker:
        def train_step(self, seconds):
            burn(seconds)
            other = threading.Thread(target=burn, args=(0.5,))
            other.start()
            other.join()  # waits
            return "trained"

    result, timing = timed_call(Worker(), "train_step", 0.05)
    assert result == "trained"
    assert timing.seconds > 0.5
    assert 0.05 <= timing.busy_seconds < 0.25


def test_busy_seconds_of_the_worker_take_precedence():
    class Worker:
        busy_seconds = 5.0

        def train_step(self, seconds):
            self.busy_seconds += seconds

    _, timing = timed_call(Worker(), "train_step", 0.75)
    assert timing.busy_seconds == 0.75


def test_calls_are_logged_by_rank_and_old_ones_dropped():
    log = CallLog()
    for number in range(MAX_CALLS + 5):
        log.add("trainer", str(number), [0, 1], [CallTime(2.0, 1.0), CallTime(2.0, 1.5)])
    first, second = log.take(2)
    assert first[0] == CallRecord("trainer", "5", 2.0, 1.0, 0)
    assert second[-1] == CallRecord("trainer", str(MAX_CALLS + 4), 2.0, 1.5, 1)
    assert len(first) == len(second) == MAX_CALLS
    assert log.take(2) == [[], []]
