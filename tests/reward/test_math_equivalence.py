from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.errors import RewardError
from megarl.reward import math_equivalence
from megarl.reward.math_equivalence import CheckerPool, EquivalenceChecker, EquivalenceError


@pytest.fixture
def checker() -> Iterator[EquivalenceChecker]:
    checker = EquivalenceChecker()
    yield checker
    checker.close()


@pytest.fixture
def occupied_descriptors() -> Iterator[None]:
    """Occupies all file descriptors up to 1,023, so that new ones get higher numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 1200
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} file descriptors, the hard limit is {hard}")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] < 1023:
        opened.append(os.dup(opened[-1]))
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("occupied_descriptors")
def test_works_with_file_descriptors_above_1023(checker: EquivalenceChecker) -> None:
    assert checker.is_equivalent("x+1", "1+x")
    assert checker._child is not None
    assert checker._child.stdout is not None
    assert checker._child.stdout.fileno() > 1023
    with pytest.raises(EquivalenceError, match=r"took longer than timeout_seconds = 0\.5$"):
        checker.is_equivalent("9^{9^{9^{9}}}", "2^x", 0.5)
    assert checker._child is None


def test_endless_computation_times_out_and_the_next_request_succeeds(checker: EquivalenceChecker) -> None:
    assert checker.is_equivalent("x+1", "1+x")
    begun = time.perf_counter()
    with pytest.raises(EquivalenceError, match=r"took longer than timeout_seconds = 0\.5$"):
        checker.is_equivalent("9^{9^{9^{9}}}", "2^x", 0.5)
    assert time.perf_counter() - begun >= 0.5
    assert checker._child is None, "it would reply to the next request with the result of this one"
    assert checker.is_equivalent("x+1", "1+x")


def test_works_from_many_threads(checker: EquivalenceChecker) -> None:
    assert threading.current_thread() is threading.main_thread()
    pairs = [(f"x+{i}", f"{i % 3}+x") for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda pair: checker.is_equivalent(*pair), pairs))
    assert got == [i % 3 == i for i in range(12)]


def test_dead_child_is_replaced(checker: EquivalenceChecker) -> None:
    assert checker.is_equivalent("x+1", "1+x")
    assert checker._child is not None
    checker._child.kill()
    checker._child.wait()
    with pytest.raises(EquivalenceError, match=r"^the process of math-verify died with exit code -9$"):
        checker.is_equivalent("y+1", "1+y")
    assert checker.is_equivalent("y+1", "1+y")


@pytest.mark.parametrize("text", ["", "\\", "{", "}", "\n", "\\frac{1}", "\x00", "日本", '"'])
def test_invalid_expressions_are_not_equivalent(checker: EquivalenceChecker, text: str) -> None:
    assert not checker.is_equivalent(text, "x+1")


def test_child_that_does_not_start_raises(
    checker: EquivalenceChecker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "child.py"
    broken.write_text("raise SystemExit('no math here')")
    monkeypatch.setattr(math_equivalence, "CHILD", broken)
    with pytest.raises(RewardError, match=r"needs math-verify, but its process did not start"):
        checker.is_equivalent("a", "b")


@pytest.fixture
def pool() -> Iterator[CheckerPool]:
    pool = CheckerPool(2)
    yield pool
    pool.close()


def children(pool: CheckerPool) -> list[int]:
    return [checker._child.pid for checker in pool._checkers if checker._child is not None]


def test_a_pool_starts_a_second_process_only_if_the_first_is_busy(pool: CheckerPool) -> None:
    for i in range(3):
        assert pool.is_equivalent(f"x+{i}", f"{i}+x")
    assert len(children(pool)) == 1
    with ThreadPoolExecutor(2) as threads:
        hanging = threads.submit(pool.is_equivalent, "9^{9^{9^{9}}}", "2^x", 6.0)
        while len(children(pool)) < 1 or pool._free.qsize() > 1:
            time.sleep(0.01)
        assert pool.is_equivalent("x+7", "7+x", 60.0), "it does not wait for the hanging comparison"
        assert not hanging.done()
        with pytest.raises(EquivalenceError, match="took longer"):
            hanging.result()


def test_a_comparison_after_the_death_of_a_process_starts_another(pool: CheckerPool) -> None:
    assert pool.is_equivalent("x+1", "1+x")
    os.kill(children(pool)[0], signal.SIGKILL)
    with pytest.raises(EquivalenceError, match="died with exit code -9"):
        pool.is_equivalent("y+1", "1+y")
    assert pool.is_equivalent("y+1", "1+y")


def test_a_comparison_that_times_out_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([EquivalenceError("slow"), True])
    calls = []

    def check(self: EquivalenceChecker, prediction: str, reference: str, timeout_seconds: float) -> bool:
        calls.append(timeout_seconds)
        result = next(results)
        if isinstance(result, EquivalenceError):
            raise result
        return result

    monkeypatch.setattr(EquivalenceChecker, "is_equivalent", check)
    math_equivalence.is_equivalent.cache_clear()
    with pytest.raises(EquivalenceError, match="slow"):
        math_equivalence.is_equivalent("a+b", "b+a", 0.7)
    assert math_equivalence.is_equivalent("a+b", "b+a", 0.7)
    assert math_equivalence.is_equivalent("a+b", "b+a", 0.7)
    assert calls == [0.7] * 2
    math_equivalence.is_equivalent.cache_clear()
