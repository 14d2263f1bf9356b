from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.reward.answer_extraction import extract_final_answer, parse_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("8+3=11 #### 11", "11"),
        ("#### 1\nno:\n####  2 \nmore", "2"),
        ("#### 1 #### 2", "2"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} #### 2", "2"),
        (r"#### \boxed{3}", "3"),
        (r"\boxed{1", None),
        ("#### ", None),
        ("####", None),
        ("the answer is 5", None),
        ("", None),
    ],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert extract_final_answer(text) == answer


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
