"""Answers in completions: how they are found, read as numbers, and compared, with sympy in processes of their own."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.errors import RewardError
from megarl.reward import math_equivalence, terms
from megarl.reward.answer_text import clean_answer
from megarl.reward.math_equivalence import (
    CheckerPool,
    EquivalenceChecker,
    EquivalenceError,
    extract_final_answer,
    require_comparable,
)
from megarl.reward.quantities import MAX_NUMBER_LENGTH, evaluate, read_quantity
from megarl.reward.terms import compare_final_answer, is_number, math_reward, numeric_reward, reference_structure
from tests.errors import expect_error
from tests.gsm8k import GSM8K_FOLDERS
from tests.hostile_texts import sampled_hostile_texts
from tests.time_limits import HANG_SECONDS, wait_until
from tests.time_limits import UNREACHED_SECONDS as PATIENCE

FINAL_ANSWERS = {
    "8+3=11 #### 11": "11", "#### 1\nno:\n####  2 \nmore": "2", "#### 1 #### 2": "2",
    r"so \boxed{\frac{1}{2}}.": r"\frac{1}{2}", r"\boxed{1} then \boxed{2}": "2", r"\boxed{1} #### 2": "2",
    r"#### \boxed{3}": "3", r"\boxed{1": None, "#### ": None, "####": None, "the answer is 5": None, "": None,
    r"$\boxed 5$.": "5", r"\boxed5": "5", r"\boxed {5}": "5", r"\fbox{5}": "5", r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{\boxed{5}}": "5", r"\boxed{\left\{1\right.}": r"\left\{1\right.",
    "#### Answer: 36": "36", "#### The answer is 36": "36", "#### **Answer:** 36": "36",
    "#### Final Answer\n\n36": "36",
    "#### Therefore, the final answer is: 36": "36", "#### x = 5": "x = 5", "#### Evelyn": "Evelyn",
    "\\boxed{5}\n\n#### Verification\n2 + 3 = 5": "5", "\\boxed{5}\n#### 2. Check": "5",
    "\\boxed{5}\n#### Step 2: Check": "5",
    "\\boxed{5}\n####": "5", "\\boxed{5}\n#### 6 apples": "6 apples", "#### 36\n#### Verification": "36",
    "#### Verification of 5\n\\boxed{6}": "6", "#### Solution\nwe have\n#### 5": "5",
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
    r"1.5\times 10^{3}": 1500, "1.5 * 10^3": 1500, "2e3": 2000, "1E-2": Fraction(1, 100), "3·10⁸": 300000000,
    "10^{-3}": Fraction(1, 1000), "1e999": 10**999, "10 000": 10000, r"10\,000": 10000, r"1,\!234": 1234,
    "3½": Fraction(7, 2),
    r"0.\overline{3}": Fraction(1, 3), r"0.1\overline{6}": Fraction(1, 6), r"\frac{1}{-2}": Fraction(-1, 2),
    "-(5)": -5, "(42)": 42, r"\text{5}": 5, "３６": 36, r"3\text{ and }\frac12": Fraction(7, 2),
    "72 apples": 72, "18 dollars": 18, r"\$18.00": 18, "18€": 18, "€18": 18, r"US\$18": 18, "Rs. 50": 50,
    r"\text{\$}18": 18,
    "5 million": 5_000_000, r"\$5\text{ million}": 5_000_000, "3 1/2 hours": Fraction(7, 2), "3/4 cup": Fraction(3, 4),
    r"45^\circ": 45, r"60^{\circ}": 60, "45°": 45, r"60^\circ\text{C}": 60, "72° F": 72, r"45\text{ degrees}": 45,
    "50 percent": 50,
    r"60\text{ km/h}": 60, "60 m/s": 60, r"25\text{ cm}^2": 25, "60 cm^3": 60, r"12\,\mathrm{km/h}": 12, "5kg": 5,
    r"9.8\text{ m/s}^2": Fraction(49, 5), r"9.8 \frac{\text{m}}{\text{s}^2}": Fraction(49, 5), "5 ft²": 5,
    r"5{\rm cm}": 5,
    r"5\text{ square units}": 5, "5 sq. ft.": 5, "60 miles per hour": 60, "about 5": 5, r"\text{The answer is } 5": 5,
}  # fmt: skip
NO_NUMBERS = (
    "", "-", ".", "8+3", "1,23", "12,34", "1.2.3", "2x", r"2\pi", "1/0", "3/-4", "e5", "1e9999", "9" * 201, "²",
    "٣x", "٥",
    "5x", "5 x", "5xy", "5abc", "5i", "5e", r"5\alpha", "5!", "2^3", r"\log_2 1024", r"\binom{5}{2}",
    r"\gcd(20,30)", r"|{-10}|",
    r"\lfloor 10.5\rfloor", r"\sqrt{4}", r"\frac{8+14}{2}", "11*1", r"5\cdot2", "21_5", "1011_2", "--5", "+-5",
    "x = 72", "3,5",
    "5 or 7", "5 squared", "5 to 7", "5-7", "1:00", r"\pm 5", "(5,6)", "[5]", r"3\frac{5}{2}", "3/4/5",
    "5 and a half", "0x5",
)  # fmt: skip


def parse_number(answer: str) -> Fraction | None:
    """Return the exact value of a written number, with or without a unit, or None for any other text."""
    quantity = read_quantity(clean_answer(answer)) if len(answer) <= MAX_NUMBER_LENGTH else None
    return None if quantity is None else quantity.value


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
    return numeric_reward(text, answer, strict=strict, finished=finished)


@pytest.fixture
def no_sympy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(prediction: str, reference: str, *limits: float) -> str:
        raise AssertionError(f"sympy was called for {prediction!r} and {reference!r}")

    monkeypatch.setattr(terms, "compare", fail)


@pytest.fixture(scope="module", params=GSM8K_FOLDERS)
def answers(request: pytest.FixtureRequest) -> list[str]:
    folder, num_rows = request.param
    answers = [json.loads(line)["answer"] for line in (folder / "train.jsonl").read_text().splitlines()]
    assert len(answers) == num_rows
    return answers


@pytest.mark.usefixtures("no_sympy")
def test_every_published_answer_equals_itself(answers: list[str]) -> None:
    for strict in (False, True):
        assert all(score(answer, answer, strict=strict) == 1.0 for answer in answers)


@pytest.mark.usefixtures("no_sympy")
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


NO_ELEVENS = (
    "8+3", "22-11", "11*1", r"11 \times 1", r"\sqrt{121}", "eleven", "", "x", "7=11", "8+3=12=11", "1=2=3=11",
    "2x=22=11",
    r"5 \approx 11", r"8+3 \approx 12", "10 + 1 = 12 = 11", "x^2 = 11", "-x = 11", "11 = 8+3", "11 + 0", "x < 11",
    "11, 12",
    r"11 \text{ or } 12", r"\sin 30^\circ = 11", r"\binom{11}{1}", r"11_{12}", "0x11", "110%/10",
)  # fmt: skip


@pytest.mark.parametrize("prediction", NO_ELEVENS)
def test_arithmetic_that_is_not_carried_out_or_wrong_scores_zero(prediction: str) -> None:
    assert score(f"\\boxed{{{prediction}}}", "11") == 0.0
    assert compare_final_answer(f"\\boxed{{{prediction}}}", "11") == "unequal"


STATED: dict[str, Fraction | int] = {
    "8+3=11": 11, "12*3 = 36": 36, r"\frac{8+14}{2} = 11": 11, r"\sqrt{16}=4": 4, "sqrt(16) = 4": 4, "5! = 120": 120,
    "2^{10}=1024": 1024, r"\log_2 1024 = 10": 10, r"\binom{5}{2} = 10": 10,
    r"\sin 30^\circ = \frac{1}{2}": Fraction(1, 2),
    "x = 5": 5, "x+y=5": 5, "f(2) = 5": 5, r"\text{Area} = 5\text{ cm}^2": 5, r"m\angle ABC = 45^\circ": 45,
    "a_n = 3": 3,
    "5 cm * 3 cm = 15 cm^2": 15, r"\approx 3.14": Fraction(157, 50), r"\frac{22}{7} \approx 3.14": Fraction(157, 50),
    r"\pi \approx 3.14": Fraction(157, 50), r"2\sqrt{3}\approx 3.46": Fraction(173, 50), r"x \approx 5": 5,
    r"\frac13 \approx 0.33": Fraction(1, 3),
}  # fmt: skip


@pytest.mark.parametrize("prediction", STATED)
def test_equations_and_roundings_count_by_their_last_side(prediction: str) -> None:
    assert score(f"\\boxed{{{prediction}}}", str(STATED[prediction])) == 1.0
    assert score(f"\\boxed{{{prediction}}}", str(STATED[prediction] + 1)) == 0.0


@given(st.recursive(st.integers(0, 99).map(str), lambda e: st.builds("({}{}{})".format, e, st.sampled_from("+-*/"), e)))
def test_arithmetic_is_that_of_python(text: str) -> None:
    try:
        expected = eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction})
    except ZeroDivisionError:
        expected = None
    assert evaluate(text) == expected


UNITS = {
    (r"5\text{ m}", r"5\text{ meters}"): 1, (r"5\text{ m}", r"5\text{ cm}"): 0, ("5 square meters",
    r"5\text{ m}^2"): 1,
    (r"\$5", "5 dollars"): 1, (r"\$5", "5€"): 0, ("5", r"5\text{ cm}"): 1, ("5 cm", "5"): 1, ("5 apples",
    "5 pears"): 1,
    ("45", r"45^\circ"): 1, (r"45\text{ degrees}", r"45^\circ"): 1, (r"45\text{ radians}", r"45^\circ"): 0,
    (r"60^\circ\text{C}", r"60^\circ"): 1, ("60°C", "60°F"): 0, ("50", r"50\%"): 1, (r"50\%", "0.5"): 0, ("x=2",
    "y=2"): 0,
    ("60 km/h", r"60\text{ kilometers per hour}"): 1, ("60 km/h", r"60\text{ mph}"): 0, ("5 million", "5"): 0,
}  # fmt: skip


@pytest.mark.parametrize(("prediction", "reference"), UNITS)
def test_units_agree_where_both_answers_have_one(prediction: str, reference: str) -> None:
    assert score(f"\\boxed{{{prediction}}}", reference) == UNITS[prediction, reference]


@pytest.mark.usefixtures("no_sympy")
def test_numbers_words_and_long_answers_take_no_process() -> None:
    assert math_reward("#### " + "x+" * 500, "y") == "unequal"
    assert math_reward("#### 1/2", "0.5") == "equal"
    assert math_reward(r"\boxed{\textbf{(C)}\ 12}", "C") == "equal"
    assert math_reward("#### monday", r"\text{Monday}") == "equal"
    assert math_reward("no answer", "x+1") == "unequal"
    assert math_reward(rf"\boxed{{{'(' * 20}x{')' * 20}}}", "x+1") == "undecided"


@pytest.mark.parametrize("text", ["#### 9\n", "#### 9.", "#### 9.0", "#### 19", "####9", "9", "#### 9 #### 8", ""])
def test_strict_requires_the_exact_end(text: str) -> None:
    assert score(text, "9", strict=True) == 0.0


def test_only_strict_requires_a_finished_completion() -> None:
    text = "8+3=11;11-2=9 #### 9"
    assert [score(text, "9", strict=True, finished=finished) for finished in (True, False)] == [1.0, 0.0]
    assert score("#### 9", "9", finished=False) == 1.0


def expression(text: str) -> str:
    """Return the structure of an expression as JSON."""
    return json.dumps(["expression", text])


ENDLESS = (expression("\\int_0^\\infty e^{-x^{x^x}} dx"), expression("2^x"))


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
    return checker.compare(expression(f"{name}+1"), expression(f"1+{name}"), PATIENCE, PATIENCE) == "equal"


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
    assert checker.child is not None
    assert checker.child.stdout is not None
    assert checker.child.stdout.fileno() > 1023
    checker.close()


def test_comparison_beyond_its_cpu_time_is_undecided_and_the_child_lives_on(checker: EquivalenceChecker) -> None:
    assert works(checker)
    child = checker.child
    assert checker.compare(*ENDLESS, 0.3, PATIENCE) == "undecided"
    assert checker.child is child
    assert works(checker)


def test_child_without_a_reply_is_killed_and_the_next_request_succeeds(checker: EquivalenceChecker) -> None:
    assert works(checker)
    with expect_error(EquivalenceError, "timeout_seconds = 0.1"):
        checker.compare(*ENDLESS, PATIENCE, 0.1)
    assert checker.child is None, "it would reply to the next request with the result of this one"
    assert works(checker)


def test_works_from_many_threads(checker: EquivalenceChecker) -> None:
    pairs = [(expression(f"x+{i}"), expression(f"{i % 3}+x"), PATIENCE, PATIENCE) for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda pair: checker.compare(*pair), pairs))
    assert got == ["equal" if i % 3 == i else "unequal" for i in range(12)]


def test_dead_child_is_replaced(checker: EquivalenceChecker) -> None:
    assert works(checker)
    assert checker.child is not None
    checker.child.kill()
    checker.child.wait()
    with expect_error(EquivalenceError, "-9", "process", "sympy"):
        works(checker, "y")
    assert works(checker, "y")


@pytest.mark.parametrize(
    "text", ["", "\\", "{", "}", "\n", "\\frac{1}", "\x00", "日本", '"', "\ud800", "x:", "1/0", "[" * 900]
)
def test_invalid_expressions_are_not_equal(checker: EquivalenceChecker, text: str) -> None:
    word = checker.compare(expression(text), expression("x+1"), PATIENCE, PATIENCE)
    assert word in ("unreadable prediction", "undecided")
    word = checker.compare(expression("x+1"), expression(text), PATIENCE, PATIENCE)
    assert word in ("unreadable reference", "undecided")


def test_child_that_does_not_start_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "child.py"
    broken.write_text("raise SystemExit('no math here')")
    monkeypatch.setattr(math_equivalence, "CHILD", broken)
    with expect_error(RewardError, "latex2sympy2_extended"):
        EquivalenceChecker().compare(expression("a"), expression("b"))


def test_a_pool_starts_a_second_process_only_if_the_first_is_busy() -> None:
    pool = CheckerPool(2)

    def children() -> list[int]:
        return [checker.child.pid for checker in pool.checkers if checker.child is not None]

    try:
        for name in "xyz":
            assert works(pool, name)
        (first,) = children()
        with ThreadPoolExecutor(2) as threads:
            hanging = threads.submit(pool.compare, *ENDLESS, PATIENCE, PATIENCE)
            assert wait_until(lambda: pool._free.qsize() <= 1)
            assert works(pool, "w"), "it does not wait for the hanging comparison"
            assert not hanging.done()
            os.kill(first, signal.SIGKILL)
            with expect_error(EquivalenceError, "-9"):
                hanging.result(HANG_SECONDS)
        assert pool._free.qsize() == 2
    finally:
        pool.close()


def compare(prediction: str, reference: str, cpu_seconds: float = PATIENCE) -> str:
    return math_reward(rf"so \boxed{{{prediction}}}", reference, cpu_seconds=cpu_seconds, timeout_seconds=PATIENCE)


EQUAL = [line.split(" | ") for line in (Path(__file__).parent / "equal_answers.txt").read_text().splitlines()]
UNEQUAL = [line.split(" | ") for line in (Path(__file__).parent / "unequal_answers.txt").read_text().splitlines()]


@pytest.mark.parametrize(("prediction", "reference"), EQUAL)
def test_equal_answers(prediction: str, reference: str) -> None:
    assert compare(prediction, reference) == "equal"
    if is_number(reference):
        assert score(rf"\boxed{{{prediction}}}", reference) == 1.0


@pytest.mark.parametrize(("prediction", "reference"), UNEQUAL)
def test_unequal_answers(prediction: str, reference: str) -> None:
    assert compare(prediction, reference) in ("unequal", "undecided")
    assert score(rf"\boxed{{{prediction}}}", reference) == 0.0


@pytest.mark.parametrize(
    "tower", ["9^{9^{9^9}}", "(10^{10})!", r"\binom{10^{20}}{10^{19}}", "10^{10^{10}}", "2^{-9^{9^9}}", "((9^9)!)!",
    "{" * 30 + "5" + "}" * 29 + "+x}"]
)  # fmt: skip
def test_huge_numbers_and_deep_nesting_are_undecided(tower: str) -> None:
    assert compare(tower, "x+1") in ("undecided", "unequal")
    assert score(rf"\boxed{{{tower}}}", "5") == 0.0


def test_only_a_reference_that_fails_alone_is_an_error() -> None:
    endless = r"\int_0^\infty e^{-x^{x^x}} dx"
    assert compare(endless, "x+1", cpu_seconds=0.3) == "undecided"
    with expect_error(EquivalenceError, "cpu_seconds = 0.3"):
        compare("x+1", endless + "+1", cpu_seconds=0.3)
    structure = reference_structure(r"\frac{1}{")
    assert structure is not None
    with expect_error(EquivalenceError, "reference", "answer"):
        require_comparable(structure, PATIENCE, PATIENCE)


def test_lost_child_is_the_outcome_of_the_prediction_if_the_reference_compares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replies: Iterator[str | EquivalenceError] = iter([EquivalenceError("died"), "equal", EquivalenceError("died")])

    def check(self: EquivalenceChecker, *request: object) -> str:
        reply = next(replies)
        if isinstance(reply, EquivalenceError):
            raise reply
        return reply

    monkeypatch.setattr(EquivalenceChecker, "compare", check)
    math_equivalence.compare.cache_clear()
    require_comparable.cache_clear()
    assert math_equivalence.compare(expression("a"), expression("b")) == "undecided"
    require_comparable.cache_clear()
    with pytest.raises(EquivalenceError, match="died"):
        require_comparable(expression("b"))
    math_equivalence.compare.cache_clear()
    require_comparable.cache_clear()


TEXT_PARTS = [
    "\\boxed{", "}", "{", "#### ", "\\frac", "\\text{", "^", "_", "\\sqrt", "9", "5", "x", "=", "\\approx", ",", "(",
    "\\{", "\\}", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "\\pm", "<", "\\cup", "\ud800", "\x00", "٣", "²",
    "%", "$", " ", "\n", "or", "cm", "\\%", "!", "|", ":", "-", "\\left", "\\right.", "Answer", "e", "i", ".", "10",
    "]", "½", "…",
]  # fmt: skip


@settings(max_examples=400)
@example("(" * 190)
@example("|" * 190)
@example("-" * 190 + "1")
@given(
    st.lists(st.sampled_from(TEXT_PARTS) | st.text(max_size=3), max_size=40).map("".join)
    | st.builds(lambda a, b, n, c: (a + b) * n + c, *[st.sampled_from(TEXT_PARTS)] * 2, st.integers(1, 150), st.text())
)
def test_no_text_raises_an_error(text: str) -> None:
    for completion in (text, f"\\boxed{{{text}}}", f"#### {text}"):
        for reference in ("5", "x+1", "(0,1]", r"\text{Evelyn}", text):
            assert score(completion, reference) in (0.0, 1.0)
            compared = compare_final_answer(completion, reference)
            assert isinstance(compared, tuple) or compared in ("equal", "unequal", "undecided")


@pytest.mark.parametrize("name", sampled_hostile_texts())
def test_hostile_texts_score_zero(name: str) -> None:
    text = sampled_hostile_texts()[name]
    for completion in (text, f"\\boxed{{{text}}}"):
        assert score(completion, "271828") == 0.0
        assert compare_completion(completion, "x+271828") in ("unequal", "undecided")


def compare_completion(completion: str, reference: str) -> str:
    return math_reward(completion, reference, cpu_seconds=0.5, timeout_seconds=PATIENCE)
