"""Answers in completions: how they are found, read as numbers, and compared, in processes of math-verify."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import RewardError
from megarl.reward import math_equivalence, rules
from megarl.reward.answer_extraction import extract_final_answer, parse_number
from megarl.reward.math_equivalence import CheckerPool, EquivalenceChecker, EquivalenceError
from megarl.reward.rules import numeric_reward
from tests.gsm8k import GSM8K_FOLDERS
from tests.time_limits import HANG_SECONDS, wait_until
from tests.time_limits import UNREACHED_SECONDS as PATIENCE

FINAL_ANSWERS = {
    "8+3=11 #### 11": "11", "#### 1\nno:\n####  2 \nmore": "2", "#### 1 #### 2": "2",
    r"so \boxed{\frac{1}{2}}.": r"\frac{1}{2}", r"\boxed{1} then \boxed{2}": "2", r"\boxed{1} #### 2": "2",
    r"#### \boxed{3}": "3", r"\boxed{1": None, "#### ": None, "####": None, "the answer is 5": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize("text", FINAL_ANSWERS)
def test_final_answer(text: str) -> None:
    assert extract_final_answer(text) == FINAL_ANSWERS[text]


NUMBERS = {
    "72": 72, "-72": -72, "+7": 7, "−7": -7, "007": 7, "1,234,567": 1234567, "1{,}000": 1000,
    "$72.50": Fraction(145, 2), r"\$72": 72, "$5$": 5, "-$5": -5, "50%": 50, r"50\%": 50, "72.": 72, "**72**": 72,
    "**72.**": 72, ".5": Fraction(1, 2), "5.": 5, "3/4": Fraction(3, 4), "-3/4": Fraction(-3, 4),
    "3 1/2": Fraction(7, 2), r"\frac{1}{2}": Fraction(1, 2), r"-\dfrac{1}{2}": Fraction(-1, 2),
    r"\frac12": Fraction(1, 2), r"3\frac{1}{2}": Fraction(7, 2), r"-3\frac{1}{2}": Fraction(-7, 2),
    r"1.5\times 10^{3}": 1500, "1.5 * 10^3": 1500, "2e3": 2000, "1E-2": Fraction(1, 100), "x = 72": 72,
}  # fmt: skip
NO_NUMBERS = (
    "", "-", ".", "8+3", "1,23", "12,34", "1.2.3", "72 apples", "2x", r"2\pi", "1/0", "3/-4", "e5", "1e999", "9" * 101,
    "²", "٣x",
)  # fmt: skip


@pytest.mark.parametrize("text", [*NUMBERS, *NO_NUMBERS])
def test_numbers(text: str) -> None:
    assert parse_number(text) == NUMBERS.get(text)


@given(st.fractions(max_denominator=10**6))
def test_fractions_round_trip(value: Fraction) -> None:
    assert parse_number(str(value)) == value
    sign = "-" if value < 0 else ""
    assert parse_number(rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}") == value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_decimals_round_trip_with_and_without_commas(value: object) -> None:
    assert parse_number(f"{value:f}") == parse_number(f"{value:,f}") == Fraction(str(value))


@given(st.text(alphabet="#0123456789 .,$%-/\\{}boxedfrac\n", max_size=200))
def test_arbitrary_text_raises_no_error(text: str) -> None:
    answer = extract_final_answer(text)
    assert answer is None or parse_number(answer) is None or isinstance(parse_number(answer), Fraction)


@pytest.mark.parametrize(
    "make_text",
    [lambda n: "#### " + " " * n, lambda n: "#" * n, lambda n: "\\boxed{" * (n // 5), lambda n: "#### " + "1" * n],
    ids=["spaces", "marks", "boxes", "digits"],
)
def test_time_for_degenerate_completions_grows_with_their_length(make_text: Callable[[int], str]) -> None:
    def seconds(length: int) -> float:
        """Return the least CPU seconds of some runs."""
        text, found = make_text(length), []
        for _ in range(5):
            begun = time.thread_time()
            answer = extract_final_answer(text)
            if answer is not None:
                parse_number(answer)
            found.append(time.thread_time() - begun)
        return min(found)

    assert seconds(200_000) < 60 * max(seconds(10_000), 1e-4)  # 20 times as long; squared, 400 times


def score(text: str, answer: str, *, strict: bool = False, finished: bool = True) -> float:
    return numeric_reward(text, answer, strict=strict, finished=finished, timeout_seconds=PATIENCE)


@pytest.fixture
def no_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(prediction: str, reference: str, timeout_seconds: float) -> bool:
        raise AssertionError(f"math-verify was called for {prediction!r} and {reference!r}")

    monkeypatch.setattr(rules, "is_equivalent", fail)


@pytest.fixture(scope="module", params=GSM8K_FOLDERS)
def answers(request: pytest.FixtureRequest) -> list[str]:
    folder, num_rows = request.param
    answers = [json.loads(line)["answer"] for line in (folder / "train.jsonl").read_text().splitlines()]
    assert len(answers) == num_rows
    return answers


@pytest.mark.usefixtures("no_math_verify")
def test_every_published_answer_equals_itself(answers: list[str]) -> None:
    for strict in (False, True):
        assert all(score(answer, answer, strict=strict) == 1.0 for answer in answers)


@pytest.mark.usefixtures("no_math_verify")
def test_equivalent_spellings_of_published_answers(answers: list[str]) -> None:
    for answer in answers:
        value = int(answer.split("#### ")[1].replace(",", ""))
        for same in (f"{value:,}", f"${value}.00", f"{value}.", f"{2 * value}/2", f"{value} %"):
            assert score(f"hence #### {same}", answer) == 1.0, (same, answer)
            assert score(f"hence \\boxed{{{same}}}", answer) == 1.0, (same, answer)
        for other in (value + 1, value - 1, -value or 1, value * 10 or 10, f"{value}.5"):
            assert score(f"hence #### {other}", answer) == 0.0, (other, answer)
        assert score(f"hence {value}", answer) == 0.0
        assert score(f"#### {value}\n#### {value + 1}", answer) == 0.0


@pytest.mark.usefixtures("no_math_verify")
@pytest.mark.parametrize(
    "prediction", ["8+3", "22-11", "11*1", "8+3=11", r"11 \times 1", r"\sqrt{121}", "eleven", "", "x"]
)
def test_unevaluated_arithmetic_scores_zero(prediction: str) -> None:
    assert score(f"#### {prediction}", "11") == 0.0


EQUIVALENT = {
    ("1/2", "0.5"): 1.0, (r"\frac{2}{4}", "0.5"): 1.0, (r"\frac{\pi}{2}", r"\pi/2"): 1.0, ("1+x", "x+1"): 1.0,
    ("(1, 2)", "(1,2)"): 1.0, (r"2\sqrt{3}", r"\sqrt{12}"): 1.0, (r"\sqrt{13}", r"\sqrt{12}"): 0.0,
    ("x+2", "x+1"): 0.0,
}  # fmt: skip


@pytest.mark.parametrize(("prediction", "reference"), EQUIVALENT)
def test_equivalent_expressions(prediction: str, reference: str) -> None:
    assert score(rf"so \boxed{{{prediction}}}", reference) == EQUIVALENT[prediction, reference]


@pytest.mark.usefixtures("no_math_verify")
def test_long_expressions_skip_math_verify() -> None:
    assert score("#### " + "x+" * 500, "y") == 0.0


@pytest.mark.parametrize("text", ["#### 9\n", "#### 9.", "#### 9.0", "#### 19", "####9", "9", "#### 9 #### 8", ""])
def test_strict_requires_the_exact_end(text: str) -> None:
    assert score(text, "9", strict=True) == 0.0


def test_only_strict_requires_a_finished_completion() -> None:
    text = "8+3=11;11-2=9 #### 9"
    assert [score(text, "9", strict=True, finished=finished) for finished in (True, False)] == [1.0, 0.0]
    assert score("#### 9", "9", finished=False) == 1.0


ENDLESS = ("9^{9^{9^{9}}}", "2^x")


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
            assert wait_until(lambda: pool._free.qsize() <= 1)
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
