from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.errors import RewardError
from megarl.reward import math_equivalence
from megarl.reward.math_equivalence import EquivalenceChecker


@pytest.fixture
def checker() -> Iterator[EquivalenceChecker]:
    checker = EquivalenceChecker(timeout_seconds=5.0)
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
    checker.timeout_seconds = 0.5
    assert not checker.is_equivalent("9^{9^{9^{9}}}", "2^x")
    assert checker._child is None


def test_endless_computation_times_out_and_the_next_request_succeeds(checker: EquivalenceChecker) -> None:
    assert checker.is_equivalent("x+1", "1+x")
    checker.timeout_seconds = 0.5
    begun = time.perf_counter()
    assert not checker.is_equivalent("9^{9^{9^{9}}}", "2^x")
    assert 0.5 <= time.perf_counter() - begun < 5.0
    assert checker._child is None, "it would reply to the next request with the result of this one"
    checker.timeout_seconds = 5.0
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
    assert not checker.is_equivalent("y+1", "1+y")
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
