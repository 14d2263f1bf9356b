"""Comparison of a program's outputs with expected ones, which its sandbox never gets."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Any

from megarl.sandbox.sandbox import Case, Outcome

MAX_QUOTED = 120
"""Characters of a value in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest differences of two numbers, as in `math.isclose`."""

    relative: float = 1e-9
    absolute: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TestCase:
    """One input of a program, and the output that it needs to have."""

    __test__ = False  # pytest does not collect it

    case: Case
    expected: Any
    """Text of stdout for a case with stdin; value of the call otherwise."""
    tolerance: Tolerance | None = None
    """Compare a number with a tolerance; None: values need to be equal."""
    as_truth: bool = False
    """Compare only whether the value is true, as `assert f(x)` does."""


def is_passed(test: TestCase, outcome: Outcome) -> bool:
    """Whether a program's output is the expected one; texts are compared without white space at the ends of lines.

    A program that ran into a limit, or whose exit code is not 0, passes no test.
    """
    if outcome.status != "ok":
        return False
    if test.case.call is None:
        return _lines(outcome.stdout) == _lines(str(test.expected))
    try:
        value = ast.literal_eval(outcome.value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False  # no value, or bytes that a program wrote in its place
    if test.as_truth:
        return bool(value) == bool(test.expected)
    if test.tolerance is not None:
        if not isinstance(value, int | float):
            return False
        return math.isclose(value, test.expected, rel_tol=test.tolerance.relative, abs_tol=test.tolerance.absolute)
    return bool(value == test.expected)


ENDS = {
    "timeout": "runs into a time limit",
    "memory": "uses too much memory",
    "output": "prints too much",
    "killed": "is ended by a signal",
}
"""What a program did, by the status of its outcome."""


def describe_failure(test: TestCase, outcome: Outcome) -> str:
    """Return what came out of a program that does not pass a test, and what the test needs."""
    what = "of the input" if test.case.call is None else test.case.call
    if outcome.status != "ok":
        *_, error = ["exit code other than 0", *outcome.stderr.strip().splitlines()]
        return f"{_cut(what)} {ENDS.get(outcome.status, f'fails: {_cut(error)}')}"
    got = repr(outcome.stdout) if test.case.call is None else outcome.value or "no value"
    return f"{_cut(what)} gives {_cut(got)}, needs {_cut(repr(test.expected))}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
