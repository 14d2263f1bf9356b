"""Waits for the calls of many ranks, with a fake Ray; tests/workers/test_group.py waits for real processes."""

from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from megarl.errors import LostRankError, MegarlError, WeightSyncError
from megarl.workers import failures

NUM_RANKS = 2000


class FakeRay:
    """A Ray with a clock of its own, whose calls are over one after another; counts what is asked of it."""

    def __init__(self, results, per_second):
        self._results, self._per_second, self.now = results, per_second, 0.0
        self.looks, self.num_fetched = 0, 0
        """References that `wait` has looked at, and results fetched."""

    def wait(self, refs, *, num_returns, timeout):
        self.looks += len(refs)
        all_over = (sorted(refs)[num_returns - 1] + 1) / self._per_second
        self.now = max(self.now, all_over if timeout is None else min(all_over, self.now + timeout))
        done = [ref for ref in refs if ref + 1 <= self.now * self._per_second][:num_returns]
        taken = set(done)
        return done, [ref for ref in refs if ref not in taken]

    def get(self, refs):
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        self.num_fetched += 1
        result = self._results[refs]
        if isinstance(result, Exception):
            raise result
        return result


def make_ray(monkeypatch, results, per_second=1e9):
    fake = FakeRay(results, per_second)
    monkeypatch.setattr(failures, "ray", fake)
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: fake.now))
    return fake


def wait_all(num_ranks):
    names = {ref: f"rank {ref}" for ref in range(num_ranks)}
    return failures.wait_all(list(names), what="push", names=names)


def failed(cause):
    return RayTaskError("push", "", cause)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 100.0])
def test_waiting_for_many_ranks_takes_looks_in_proportion_to_their_number(monkeypatch, seconds):
    expected = [f"result {rank}" for rank in range(NUM_RANKS)]
    fake = make_ray(monkeypatch, expected, NUM_RANKS / seconds if seconds else 1e9)
    assert wait_all(NUM_RANKS) == expected
    assert fake.looks <= NUM_RANKS * (2 + seconds / failures.BATCH_SECONDS)
    assert fake.num_fetched == NUM_RANKS


def test_a_failure_is_raised_before_the_other_ranks_answer(monkeypatch):
    results = [None] * NUM_RANKS
    results[3] = failed(MegarlError("rank 3: disk full"))
    fake = make_ray(monkeypatch, results, per_second=20.0)
    with pytest.raises(MegarlError, match="rank 3: disk full"):
        wait_all(NUM_RANKS)
    assert fake.now < 1.0


def test_the_cause_is_raised_if_several_ranks_fail_together(monkeypatch):
    results = [failed(LostRankError("lost rank 5")), failed(WeightSyncError("late"))]
    results += [None, failed(MegarlError("rank 3: disk full"))]
    make_ray(monkeypatch, results)
    with pytest.raises(MegarlError, match="rank 3: disk full"):
        wait_all(len(results))
