"""Which rank holds up the others."""

from __future__ import annotations

import threading
import time

import pytest

from megarl.workers.stragglers import KEPT, CallLog, CallRecord, Straggler, StragglerWatch, slowest


def step(*worked: float, method: str = "train_step", wall: float = 9.0) -> list[list[CallRecord]]:
    """Of one phase, by rank; all ranks take the same time."""
    return [[CallRecord("trainer", method, wall, seconds)] for seconds in worked]


def burn(seconds: float) -> None:
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


def test_a_rank_that_works_longer_is_named_however_long_calls_take() -> None:
    (found,) = slowest(step(1.0, 1.1, 0.9, 1.8))
    assert found == Straggler(phase="trainer.train_step", rank=3, seconds=1.8, median_seconds=1.0)
    assert found.ratio == pytest.approx(1.8)
    assert [one.rank for one in slowest(step(2.0, 1.0))] == [0]


@pytest.mark.parametrize(
    "worked",
    [
        (1.0, 1.1, 1.29),
        (0.001, 0.002, 0.09),  # 45 times, and yet nothing
        (5.0,),  # nobody waits for it
        (1.0, 1.0, 1.35, 1.35, 1.35),  # as slow as others
        (0.0, 0.0, 1.0),  # the others had nothing to do in it
    ],
)
def test_these_hold_up_nobody(worked: tuple[float, ...]) -> None:
    assert slowest(step(*worked)) == []


def test_calls_of_a_phase_add_up_and_phases_are_apart() -> None:
    twice = [a + b + c for a, b, c in zip(step(1, 1, 1), step(1, 1, 3), step(2, 1, 1, method="logprobs"), strict=True)]
    found = {one.phase: (one.rank, one.seconds, one.median_seconds) for one in slowest(twice)}
    assert found == {"trainer.train_step": (2, 4, 2), "trainer.logprobs": (0, 2, 1)}


def test_stages_of_a_pipeline_are_compared_each_with_itself() -> None:
    worked = step(1.0, 1.0, 2.0, 2.1)
    assert [one.rank for one in slowest(worked)] == [3]
    assert slowest(worked, stages=[0, 0, 1, 1]) == []
    assert [one.rank for one in slowest(step(1.0, 1.5, 2.0, 2.1), stages=[0, 0, 1, 1])] == [1]
    assert slowest(step(1.0, 2.0), stages=[0, 1]) == []


def test_a_rank_that_is_slow_step_after_step_is_told_once() -> None:
    said: list[str] = []
    watch = StragglerWatch(["n1", "n1", "n2", "n2"], said.append)
    slow, even = step(1.0, 1.0, 1.0, 1.8), step(1.0, 1.0, 1.0, 1.0)
    for _ in range(4):
        assert watch.step(slow) == {"straggler/trainer.train_step_ratio": pytest.approx(1.8)}
    watch.step(even)
    watch.step(step(1.8, 1.0, 1.0, 1.0))
    for _ in range(4):
        watch.step(slow)
    assert said == []
    for _ in range(20):
        watch.step(slow)
    assert said == ["trainer rank 3 (node n2) takes 1.8 times the median in train_step, for 5 steps now"]
    assert watch.step(step(0.001, 0.002, 0.001, 0.001)) == {}


def test_waiting_is_no_work() -> None:
    log = CallLog()
    with log.call("trainer", "train_step", object()):
        burn(0.05)
        time.sleep(0.2)
        other = threading.Thread(target=burn, args=(0.1,))
        other.start()
        other.join()
    (record,) = log.take()
    assert (record.role, record.method) == ("trainer", "train_step")
    assert record.seconds > 0.3
    assert 0.05 <= record.worked < 0.15
    assert log.take() == []


def test_a_worker_that_knows_its_busy_seconds_is_believed() -> None:
    class Worker:
        busy_seconds = 5.0

    log, worker = CallLog(), Worker()
    with log.call("trainer", "train_step", worker):
        worker.busy_seconds += 0.75
    assert [record.worked for record in log.take()] == [0.75]


def test_old_records_give_way() -> None:
    log = CallLog()
    for number in range(KEPT + 5):
        with log.call("trainer", str(number), object()):
            pass
    assert [record.method for record in log.take()] == [str(number) for number in range(5, KEPT + 5)]
