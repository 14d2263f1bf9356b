"""Equality of what a program returned or printed with what a test case expects."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

NUMBER = re.compile(r"[+-]?(?:[0-9]{1,4000}(?:\.[0-9]{0,4000})?|\.[0-9]{1,4000})(?:[eE][+-]?[0-9]{1,3})?")
"""A decimal number as programs print it."""

FRACTION = re.compile(r"(?<![^\s])[+-]?[0-9]*(?:\.[0-9]*[0-9]|[0-9](?:\.[0-9]*)?[eE][+-]?[0-9]+)(?![^\s])")
"""A number with decimals or with an exponent, between white space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest differences of two numbers, as in `math.isclose`."""

    relative: float = 1e-9
    absolute: float = 0.0

    def covers(self, value: float | Fraction | Decimal, expected: float) -> bool:
        """Return whether two numbers differ by no more than this; a number too large for a float does not."""
        try:
            return math.isclose(value, expected, rel_tol=self.relative, abs_tol=self.absolute)
        except OverflowError:
            return value == expected


def is_equal(value: Any, expected: Any, tolerance: Tolerance | None) -> bool:
    """Return whether a value in built-in types is the expected one, numbers within a tolerance at any depth."""
    if tolerance is None:
        return bool(value == expected)
    match value, expected:
        case (int() | float() | Fraction() | Decimal(), int() | float()):
            return tolerance.covers(value, expected)
        case (list() | tuple(), list() | tuple()):
            return len(value) == len(expected) and all(
                is_equal(*pair, tolerance) for pair in zip(value, expected, strict=True)
            )
        case dict(), dict():
            return value.keys() == expected.keys() and all(
                is_equal(value[key], expected[key], tolerance) for key in expected
            )
        case _:
            return bool(value == expected)


def to_json_types(value: Any) -> Any:
    """Return a value as it is read back from JSON: tuples as lists, and keys as texts."""
    match value:
        case list() | tuple():
            return [to_json_types(item) for item in value]
        case dict():
            return {_json_key(key): to_json_types(item) for key, item in value.items()}
        case _:
            return value


def _json_key(key: Any) -> Any:
    match key:
        case bool() | None:
            return {True: "true", False: "false", None: "null"}[key]
        case int() | float():
            return repr(key)
        case _:
            return key


def prints_fractions(text: str) -> bool:
    """Return whether a text has numbers with decimals or with exponents."""
    return FRACTION.search(text) is not None


def is_same_text(text: str, expected: str, tolerance: Tolerance | None) -> bool:
    """Return whether a program printed the expected text.

    White space at the ends of lines and of the text does not count, and a number may be written in another way: 3.0 for
    3, and with a tolerance also 0.3333 for 0.33333333.
    """
    lines, expected_lines = _lines(text), _lines(expected)
    return lines == expected_lines or (
        len(lines) == len(expected_lines)
        and all(_is_same_line(*pair, tolerance) for pair in zip(lines, expected_lines, strict=True))
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _is_same_line(line: str, expected: str, tolerance: Tolerance | None) -> bool:
    if line == expected:
        return True
    words, expected_words = line.split(), expected.split()
    if len(words) != len(expected_words):
        return False
    pairs = [*zip(words, expected_words, strict=True)]
    if not all(word == wanted or _is_same_number(word, wanted, tolerance) for word, wanted in pairs):
        return False
    # lines that differ in white space only are drawings, unless they are rows of numbers
    return words != expected_words or all(NUMBER.fullmatch(word) for word in words)


def _is_same_number(word: str, expected: str, tolerance: Tolerance | None) -> bool:
    if not NUMBER.fullmatch(word) or not NUMBER.fullmatch(expected):
        return False
    if Decimal(word) == Decimal(expected):
        return True
    return tolerance is not None and tolerance.covers(float(word), float(expected))
