"""Waits for the calls of many ranks, with a fake Ray; tests/cluster/workers/test_group.py waits for real processes."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from megarl.cluster.workers import failures
from megarl.errors import LostRankError, MegarlError, WeightSyncError
from tests.errors import expect_error

NUM_RANKS = 2000


class FakeRef(int):
    """The call of a rank, over at a known time; Ray reports it as it ends, up to the first failure."""

    ray: "FakeRay"

    def future(self):
        future = Future()
        self.ray.num_reported += 1
        if not self.ray.has_failed:
            self.ray.now = max(self.ray.now, (self + 1) / self.ray.per_second)
            result = self.ray.results[self]
            self.ray.has_failed = isinstance(result, Exception)
            (future.set_exception if self.ray.has_failed else future.set_result)(result)
        return future


class FakeRay:
    """A Ray with a clock of its own, whose calls are over one after another; counts what is asked of it."""

    def __init__(self, results, per_second):
        self.results, self.per_second, self.now = results, per_second, 0.0
        self.looks, self.num_fetched, self.num_reported, self.has_failed = 0, 0, 0, False
        """References that `wait` has looked at, results fetched, and calls that are reported as they end."""

    def wait(self, refs, *, num_returns, timeout):
        self.looks += len(refs)
        all_over = (sorted(refs)[num_returns - 1] + 1) / self.per_second
        self.now = max(self.now, all_over if timeout is None else min(all_over, self.now + timeout))
        done = [ref for ref in refs if ref + 1 <= self.now * self.per_second][:num_returns]
        taken = set(done)
        return done, [ref for ref in refs if ref not in taken]

    def get(self, refs):
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        self.num_fetched += 1
        result = self.results[refs]
        if isinstance(result, Exception):
            raise result
        return result


def make_ray(monkeypatch, results, per_second=1e9):
    fake = FakeRay(results, per_second)
    monkeypatch.setattr(failures, "ray", fake)
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: fake.now))
    monkeypatch.setattr(FakeRef, "ray", fake, raising=False)
    return fake


def wait_all(num_ranks, **options):
    names = {FakeRef(ref): f"rank {ref}" for ref in range(num_ranks)}
    return failures.wait_all(list(names), what="push", names=names, **options)


def failed(cause):
    return RayTaskError("push", "", cause)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 100.0])
def test_each_rank_is_looked_at_a_few_times_however_long_it_takes(monkeypatch, seconds):
    expected = [f"result {rank}" for rank in range(NUM_RANKS)]
    fake = make_ray(monkeypatch, expected, NUM_RANKS / seconds if seconds else 1e9)
    assert wait_all(NUM_RANKS) == expected
    assert fake.looks <= NUM_RANKS * min(failures.NUM_LOOKS, 2 + seconds / failures.BATCH_SECONDS)
    assert fake.num_fetched + fake.num_reported == NUM_RANKS


@pytest.mark.parametrize("rank", [3, 30])
def test_a_failure_is_raised_before_the_other_ranks_answer(monkeypatch, rank):
    results = [None] * NUM_RANKS
    results[rank] = failed(MegarlError(f"rank {rank}: disk full"))
    fake = make_ray(monkeypatch, results, per_second=20.0)
    with pytest.raises(MegarlError, match=f"rank {rank}: disk full"):
        wait_all(NUM_RANKS)
    assert fake.now <= (rank + 1) / 20.0 + failures.BATCH_SECONDS


@pytest.mark.parametrize("looks", [0, failures.NUM_LOOKS])
def test_a_watched_call_need_not_end_but_its_failure_ends_the_wait(monkeypatch, looks):
    monkeypatch.setattr(failures, "NUM_LOOKS", looks)
    make_ray(monkeypatch, ["first", failed(MegarlError("engine 0: lost")), "never"], per_second=20.0)
    first, second, late = map(FakeRef, range(3))
    assert failures.wait_all([first], what="push", names={}, watched=[late]) == ["first"]
    with expect_error(MegarlError, "0", "engine"):
        failures.wait_all([first, late], what="push", names={}, watched=[second])


def test_the_cause_is_raised_if_several_ranks_fail_together(monkeypatch):
    results = [failed(LostRankError("lost rank 5")), failed(WeightSyncError("late"))]
    results += [None, failed(MegarlError("rank 3: disk full"))]
    make_ray(monkeypatch, results)
    with expect_error(MegarlError, "3"):
        wait_all(len(results))
