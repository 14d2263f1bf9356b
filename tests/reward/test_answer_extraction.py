from __future__ import annotations

import time
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        ("-72", -72),
        ("+7", 7),
        ("−7", -7),
        ("007", 7),
        ("1,234,567", 1234567),
        ("1{,}000", 1000),
        ("$72.50", Fraction(145, 2)),
        (r"\$72", 72),
        ("$5$", 5),
        ("-$5", -5),
        ("50%", 50),
        (r"50\%", 50),
        ("72.", 72),
        ("**72**", 72),
        ("**72.**", 72),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("3 1/2", Fraction(7, 2)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\dfrac{1}{2}", Fraction(-1, 2)),
        (r"\frac12", Fraction(1, 2)),
        (r"3\frac{1}{2}", Fraction(7, 2)),
        (r"-3\frac{1}{2}", Fraction(-7, 2)),
        (r"1.5\times 10^{3}", 1500),
        ("1.5 * 10^3", 1500),
        ("2e3", 2000),
        ("1E-2", Fraction(1, 100)),
        ("x = 72", 72),
    ],
)
def test_numbers(text: str, value: Fraction) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        ".",
        "8+3",
        "1,23",
        "12,34",
        "1.2.3",
        "72 apples",
        "2x",
        r"2\pi",
        "1/0",
        "3/-4",
        "e5",
        "1e999",
        "9" * 101,
        "²",
        "٣x",
    ],
)
def test_other_texts_are_not_numbers(text: str) -> None:
    assert parse_number(text) is None


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


@pytest.mark.parametrize("text", ["#### " + " " * 100_000, "#" * 100_000, "\\boxed{" * 20_000, "#### " + "1" * 100_000])
def test_degenerate_completions_take_little_time(text: str) -> None:
    begun = time.process_time()
    answer = extract_final_answer(text)
    if answer is not None:
        parse_number(answer)
    assert time.process_time() - begun < 0.2
