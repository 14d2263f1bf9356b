"""Equality of what a program returned or printed with what a test case expects.

Values of a program's calls are read from the text that comes out of its sandbox. A program may forge the text so that
reading it is expensive: the cost is bounded, and no code in it is executed.
"""

from __future__ import annotations

import ast
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

GRADING_SECONDS = 1.0
"""CPU time for one test case."""

MAX_COLLISIONS = 64
"""Members of a set, or keys of a dict, that may have one hash; adding n of them takes n * n comparisons."""

CONSTRUCTORS: Mapping[str, tuple[Callable[..., Any], type]] = {
    "Decimal": (Decimal, str),
    "Fraction": (Fraction, int),  # of a text such as 1e9999999, it would compute all digits
    "frozenset": (frozenset, set),  # of a list, it would compare members that collide
    "set": (set, set),
}
"""Calls in texts of values, with the type of their arguments as `repr` writes them."""


class UndecidedError(Exception):
    """A test case takes more CPU time to grade than it may."""


class GradingClock:
    """Counts the CPU time of this thread for one test case."""

    def __init__(self, seconds: float | None = None) -> None:
        self._deadline = time.thread_time() + (GRADING_SECONDS if seconds is None else seconds)

    def check(self) -> None:
        """Return while there is time.

        Raises:
            UndecidedError: there is none left.
        """
        if time.thread_time() > self._deadline:
            raise UndecidedError


def read_value(text: str, clock: GradingClock) -> Any:
    """Return the value of a text that `megarl.sandbox.guest.program` has written.

    Raises:
        UndecidedError: it takes too long.
        Exception: of any kind, as the text is no value.
    """
    return _read(ast.parse(text.strip(), mode="eval").body, clock)


def _read(node: ast.expr, clock: GradingClock) -> Any:
    clock.check()
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id="nan" | "inf" as name):
            return float(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_read_number(operand, clock)
        case ast.BinOp(left=left, op=ast.Add(), right=right):  # a complex number
            return _read_number(left, clock) + _read_number(right, clock)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _read_number(left, clock) - _read_number(right, clock)
        case ast.Tuple(elts=items):
            return tuple(_read(item, clock) for item in items)
        case ast.List(elts=items):
            return [_read(item, clock) for item in items]
        case ast.Set(elts=items):
            return set(_hashed(_read(item, clock) for item in items))
        case ast.Dict(keys=keys, values=values) if None not in keys:
            found = _hashed(_read(key, clock) for key in keys if key is not None)
            return dict(zip(found, (_read(value, clock) for value in values), strict=True))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in CONSTRUCTORS:
            constructor, kind = CONSTRUCTORS[name]
            values = [_read(argument, clock) for argument in arguments]
            if not all(isinstance(value, kind) for value in values):
                raise ValueError(f"{name} needs arguments of type {kind.__name__}")
            return constructor(*values)
    raise ValueError(f"a value needs to be a literal, got {type(node).__name__}")


def _read_number(node: ast.expr, clock: GradingClock) -> Any:
    value = _read(node, clock)
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        raise ValueError(f"a number needs to be a literal, got {type(value).__name__}")  # noqa: TRY004
    return value


def _hashed(items: Iterable[Hashable]) -> list[Hashable]:
    """Return the members of a set, or the keys of a dict.

    Raises:
        UndecidedError: too many of them have one hash.
    """
    found = list(items)
    if max(Counter(map(hash, found)).values(), default=0) > MAX_COLLISIONS:
        raise UndecidedError
    return found


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
