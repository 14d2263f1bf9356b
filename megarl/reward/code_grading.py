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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from megarl.sandbox.sandbox import Case, Outcome, Program, Sandbox, Status

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


Grade = Literal["passed", "failed", "undecided"] | Status
"""What a program's output on a test case is worth. `undecided`: comparing it takes too much CPU time, which counts as
failed; a status: how the program ended that has no output."""

OUTPUT_ROOM = 4096

MAX_QUOTED = 120
"""Characters of a value in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestCase:
    """One input of a program, and the output that it needs to have."""

    __test__ = False  # pytest does not collect it

    case: Case
    expected: Any
    """Text of stdout for a case with stdin; value of the call otherwise."""
    others: tuple[Any, ...] = ()
    """Outputs that are accepted beside the expected one."""
    tolerance: Tolerance | None = None
    """Compare numbers with a tolerance; None: they need to be equal."""
    as_json: bool = False
    """The expected value comes from JSON, where a tuple is a list, and keys are texts."""


def grade(test: TestCase, outcome: Outcome) -> Grade:
    """Return what a program's output is worth; texts are compared by `is_same_text`.

    A program that ran into a limit, or whose exit code is not 0, passes no test; its grade is its status.
    """
    if outcome.status != "ok":
        return outcome.status
    clock = GradingClock()
    try:
        is_accepted = _is_accepted(test, outcome, clock)
        clock.check()
    except UndecidedError:
        return "undecided"
    except Exception:  # noqa: BLE001 -- an output is any data: no value, or one that cannot be compared
        return "failed"
    return "passed" if is_accepted else "failed"


def is_passed(test: TestCase, outcome: Outcome) -> bool:
    """Return whether a program's output is one of the accepted ones; as `grade`."""
    return grade(test, outcome) == "passed"


def _is_accepted(test: TestCase, outcome: Outcome, clock: GradingClock) -> bool:
    accepted = (test.expected, *test.others)
    if test.case.call is None:
        return any(is_same_text(outcome.stdout, str(expected), test.tolerance) for expected in accepted)
    value = read_value(outcome.value, clock)
    if test.as_json:
        value = to_json_types(value)
    return any(is_equal(value, expected, test.tolerance) for expected in accepted)


def run_tests(
    sandbox: Sandbox, program: Program, tests: Sequence[TestCase], *, stop_at_failure: bool = False
) -> list[Grade]:
    """Return the grades of a program on its test cases; with `stop_at_failure`, up to the first that it does not pass.

    Raises:
        SandboxError: as `Sandbox.run`.
    """
    grades = list[Grade]()

    def until(index: int, outcome: Outcome) -> bool:
        grades.append(grade(tests[index], outcome))
        return stop_at_failure and grades[-1] != "passed"

    outcomes = sandbox.run(program, until=until)
    missing = range(len(grades), len(outcomes))  # those that the time did not suffice for
    return grades + [grade(tests[i], outcomes[i]) for i in missing]


def output_bytes(tests: Sequence[TestCase]) -> int:
    """Return the bytes of output that a right program may need, with room for other white space and messages."""
    sizes = (
        len((str if test.case.call is None else repr)(expected).encode(errors="replace"))
        for test in tests
        for expected in (test.expected, *test.others)
    )
    return 2 * max(sizes, default=0) + OUTPUT_ROOM


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
        return f"{_cut(what)} {describe_end(outcome)}"
    got = repr(outcome.stdout) if test.case.call is None else outcome.value or "no value"
    return f"{_cut(what)} gives {_cut(got)}, needs {_cut(repr(test.expected))}"


def describe_end(outcome: Outcome) -> str:
    """Return how a program ended that has no output."""
    *_, error = ["exit code other than 0", *outcome.stderr.strip().splitlines()]
    return ENDS.get(outcome.status, f"fails: {_cut(error)}")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."
