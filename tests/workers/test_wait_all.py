"""Waits for the calls of many ranks, with a fake Ray; tests/workers/test_group.py waits for real processes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from ray.exceptions import RayTaskError

from megarl.errors import LostRankError, MegarlError, WeightSyncError
from megarl.workers import failures

NUM_RANKS = 2000


class FakeRay:
    """A Ray whose calls are over one after another, `per_second` of them each second; counts what is asked of it."""

    def __init__(self, results: Sequence[object], per_second: float) -> None:
        self._results, self._per_second, self._began = results, per_second, time.monotonic()
        self.looks, self.num_fetched = 0, 0
        """References that `wait` has looked at, and results fetched."""

    def _num_over(self) -> int:
        return int((time.monotonic() - self._began) * self._per_second)

    def wait(self, refs: Sequence[int], *, num_returns: int, timeout: float | None) -> tuple[list[int], list[int]]:
        self.looks += len(refs)
        ends = time.monotonic() + (60.0 if timeout is None else timeout)
        while True:
            over = self._num_over()
            done = [ref for ref in refs if ref < over][:num_returns]
            if len(done) == num_returns or time.monotonic() >= ends:
                taken = set(done)
                return done, [ref for ref in refs if ref not in taken]
            time.sleep(0.02)

    def get(self, refs: int | list[int]) -> object:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        self.num_fetched += 1
        result = self._results[refs]
        if isinstance(result, Exception):
            raise result
        return result


def wait_all(monkeypatch: pytest.MonkeyPatch, results: Sequence[object], per_second: float) -> tuple[FakeRay, object]:
    fake = FakeRay(results, per_second)
    monkeypatch.setattr(failures.ray, "wait", fake.wait)
    monkeypatch.setattr(failures.ray, "get", fake.get)
    names = {ref: f"rank {ref}" for ref in range(len(results))}
    return fake, failures.wait_all(list(names), what="push", names=names)


def failed(cause: MegarlError) -> RayTaskError:
    return RayTaskError("push", "", cause)


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_waiting_for_many_ranks_takes_time_in_proportion_to_their_number(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    expected = [f"result {rank}" for rank in range(NUM_RANKS)]
    began = time.process_time()
    fake, results = wait_all(monkeypatch, expected, NUM_RANKS / seconds if seconds else 1e9)
    assert results == expected
    assert fake.looks <= NUM_RANKS * (2 + seconds / failures.BATCH_SECONDS)
    assert fake.num_fetched == NUM_RANKS
    assert time.process_time() - began < 2


def test_a_failure_is_raised_before_the_other_ranks_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[object] = [None] * NUM_RANKS
    results[3] = failed(MegarlError("rank 3: disk full"))
    began = time.monotonic()
    with pytest.raises(MegarlError, match="rank 3: disk full"):
        wait_all(monkeypatch, results, 20.0)
    assert time.monotonic() - began < NUM_RANKS / 20.0 / 2


def test_the_cause_is_raised_if_several_ranks_fail_together(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[object] = [failed(LostRankError("lost rank 5")), failed(WeightSyncError("late"))]
    results += [None, failed(MegarlError("rank 3: disk full"))]
    with pytest.raises(MegarlError, match="rank 3: disk full"):
        wait_all(monkeypatch, results, 1e9)
