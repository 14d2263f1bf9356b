from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.errors import RewardError
from megarl.reward import math_equivalence
from megarl.reward.math_equivalence import CheckerPool, EquivalenceChecker, EquivalenceError
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS

ENDLESS = ("9^{9^{9^{9}}}", "2^x")
PATIENCE = UNREACHED_SECONDS


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_equivalence, "START_TIMEOUT_SECONDS", PATIENCE)
        yield


@pytest.fixture(scope="module")
def checker(_patience: None) -> Iterator[EquivalenceChecker]:
    checker = EquivalenceChecker()
    yield checker
    checker.close()


def works(checker: EquivalenceChecker | CheckerPool, name: str = "x") -> bool:
    return checker.is_equivalent(f"{name}+1", f"1+{name}", PATIENCE)


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
def test_works_with_file_descriptors_above_1023() -> None:
    checker = EquivalenceChecker()
    assert works(checker)
    assert checker._child is not None
    assert checker._child.stdout is not None
    assert checker._child.stdout.fileno() > 1023
    checker.close()


def test_endless_computation_times_out_and_the_next_request_succeeds(checker: EquivalenceChecker) -> None:
    assert works(checker)
    with pytest.raises(EquivalenceError, match=r"took longer than timeout_seconds = 0\.1$"):
        checker.is_equivalent(*ENDLESS, 0.1)
    assert checker._child is None, "it would reply to the next request with the result of this one"
    assert works(checker)


def test_works_from_many_threads(checker: EquivalenceChecker) -> None:
    pairs = [(f"x+{i}", f"{i % 3}+x", PATIENCE) for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda pair: checker.is_equivalent(*pair), pairs))
    assert got == [i % 3 == i for i in range(12)]


def test_dead_child_is_replaced(checker: EquivalenceChecker) -> None:
    assert works(checker)
    assert checker._child is not None
    checker._child.kill()
    checker._child.wait()
    with pytest.raises(EquivalenceError, match=r"^the process of math-verify died with exit code -9$"):
        works(checker, "y")
    assert works(checker, "y")


@pytest.mark.parametrize("text", ["", "\\", "{", "}", "\n", "\\frac{1}", "\x00", "日本", '"'])
def test_invalid_expressions_are_not_equivalent(checker: EquivalenceChecker, text: str) -> None:
    assert not checker.is_equivalent(text, "x+1", PATIENCE)


def test_child_that_does_not_start_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "child.py"
    broken.write_text("raise SystemExit('no math here')")
    monkeypatch.setattr(math_equivalence, "CHILD", broken)
    with pytest.raises(RewardError, match=r"needs math-verify, but its process did not start"):
        EquivalenceChecker().is_equivalent("a", "b")


def test_a_pool_starts_a_second_process_only_if_the_first_is_busy() -> None:
    pool = CheckerPool(2)

    def children() -> list[int]:
        return [checker._child.pid for checker in pool._checkers if checker._child is not None]

    try:
        for name in "xyz":
            assert works(pool, name)
        (first,) = children()
        with ThreadPoolExecutor(2) as threads:
            hanging = threads.submit(pool.is_equivalent, *ENDLESS, PATIENCE)
            while pool._free.qsize() > 1:
                time.sleep(0.01)
            assert works(pool, "w"), "it does not wait for the hanging comparison"
            assert not hanging.done()
            os.kill(first, signal.SIGKILL)
            with pytest.raises(EquivalenceError, match="died with exit code -9"):
                hanging.result(HANG_SECONDS)
        assert pool._free.qsize() == 2
    finally:
        pool.close()


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
