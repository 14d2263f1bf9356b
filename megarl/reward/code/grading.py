"""Comparison of a program's outputs with expected ones, which its sandbox never gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megarl.reward.code.comparison import (
    GradingClock,
    Tolerance,
    UndecidedError,
    is_equal,
    is_same_text,
    read_value,
    to_json_types,
)
from megarl.sandbox.sandbox import Case, Outcome, Program, Sandbox, Status

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
