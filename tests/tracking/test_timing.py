"""Timing of phases."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.tracking.timing import PhaseTimer
from tests.errors import expect_error
from tests.virtual_time import run_in_virtual_time


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_seconds_accumulate_and_own_time_excludes_waiting(clock):
    timer = PhaseTimer(clock)
    timer.start_step()
    for _ in range(2):
        with timer.phase("rollout", waiting=True):
            clock.now += 3.0
        with timer.phase("advantages"):
            clock.now += 0.5
    clock.now += 1.0
    assert timer.take() == pytest.approx(
        {
            "time/rollout_seconds": 6.0,
            "time/advantages_seconds": 1.0,
            "time/step_seconds": 8.0,
            "controller/own_fraction": 2.0 / 8.0,
        }
    )
    timer.start_step()
    clock.now += 1.0
    assert timer.take() == {"time/step_seconds": 1.0, "controller/own_fraction": 1.0}
    assert timer.totals == pytest.approx({"rollout": 6.0, "advantages": 1.0})


def test_phase_over_several_steps_is_split_between_them(clock):
    timer = PhaseTimer(clock)
    timer.start_step()
    with timer.phase("rollout", waiting=True):
        clock.now += 2.0
        assert timer.take()["time/rollout_seconds"] == 2.0
        clock.now += 5.0
        timer.start_step()
        clock.now += 1.0
    clock.now += 1.0
    got = timer.take()
    assert (got["time/rollout_seconds"], got["controller/own_fraction"]) == (1.0, 0.5)
    assert timer.totals == {"rollout": 8.0}


def test_phases_outside_steps_count_only_in_totals(clock):
    timer = PhaseTimer(clock)
    with timer.phase("evaluation", waiting=True):
        clock.now += 7.0
    timer.start_step()
    clock.now += 1.0
    assert timer.take() == {"time/step_seconds": 1.0, "controller/own_fraction": 1.0}
    assert timer.totals == {"evaluation": 7.0}
    with expect_error(AssertionError, "start_step"):
        timer.take()


def test_phase_that_raises_is_measured(clock):
    timer = PhaseTimer(clock)
    timer.start_step()

    def fail():
        clock.now += 1.0
        raise KeyError

    with pytest.raises(KeyError), timer.phase("rollout", waiting=True):
        fail()
    clock.now += 1.0
    assert timer.take()["controller/own_fraction"] == 0.5


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.booleans()), max_size=6),
    st.lists(st.integers(1, 40), max_size=4),
)
def test_own_time_is_step_time_minus_union_of_waiting(spans, cuts):
    clock = Clock()
    timer = PhaseTimer(clock)
    clock.now = 0.0
    timer.start_step()
    ends = sorted({*cuts, 41})
    open_phases, waited, own = {}, [], 0.0
    seconds = []
    for tick in range(41):
        clock.now = float(tick)
        if tick in ends:
            got = timer.take()
            own += got["controller/own_fraction"] * got["time/step_seconds"]
            seconds.append(got.get("time/x_seconds", 0.0))
            timer.start_step()
        for i, (begin, length, waiting) in enumerate(spans):
            if tick == begin:
                open_phases[i] = timer.phase("x", waiting=waiting)
                open_phases[i].__enter__()
            if tick == begin + length:
                open_phases[i].__exit__(None, None, None)
        waited.append(any(b <= tick < b + n and w for b, n, w in spans))
    clock.now = 41.0
    got = timer.take()
    own += got["controller/own_fraction"] * got["time/step_seconds"]
    seconds.append(got.get("time/x_seconds", 0.0))
    bounds = [0, *ends]
    assert seconds == [
        sum(max(0, min(b + n, stop) - max(b, start)) for b, n, _ in spans) for start, stop in itertools.pairwise(bounds)
    ]
    assert own == pytest.approx(41 - sum(waited))
    assert timer.totals.get("x", 0.0) == pytest.approx(sum(n for _, n, _ in spans))


def test_phases_of_concurrent_tasks_overlap():
    async def both():
        timer = PhaseTimer(asyncio.get_running_loop().time)

        async def wait(name):
            with timer.phase(name, waiting=True):
                await asyncio.sleep(3)

        timer.start_step()
        await asyncio.gather(wait("a"), wait("b"))
        await asyncio.sleep(1)
        return timer.take()

    assert run_in_virtual_time(both()) == pytest.approx(
        {"time/a_seconds": 3, "time/b_seconds": 3, "time/step_seconds": 4, "controller/own_fraction": 1 / 4}
    )
