"""Test cases of a row: inputs, which go into a sandbox, separated from expected outputs, which do not.

Layouts of data sets are recognized by their fields, and read as published.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config.reward_code import AUTO, CodeRewardConfig
from megarl.config.sandbox import SandboxConfig
from megarl.reward.code.assertions import (
    NO_PYTHON,
    RECORDED,
    AssertionTests,
    TestCaseError,
    parse_assertions,
    parse_check_function,
)
from megarl.reward.code.grading import TestCase, describe_end, output_bytes
from megarl.reward.code.published_cases import PRELUDE, find_pairs, function_name, parse_text, text_of_lines, to_cases
from megarl.reward.code.values import GradingClock, UndecidedError, read_value
from megarl.sandbox.sandbox import Case, Outcome, Program, Sandbox
from megarl.sandbox.tiers import open_sandbox

LAYOUTS = (
    ("test_list",),  # MBPP
    ("test",),  # HumanEval, HumanEval+
    ("input_output",),  # APPS, TACO
    ("public_test_cases", "private_test_cases"),  # LiveCodeBench
    ("public_tests", "private_tests", "generated_tests"),  # CodeContests
    ("tests",),  # DeepCoder
    ("test_cases",),
    ("official_tests",),  # open-r1's Codeforces
    ("verification_info",),  # PrimeIntellect, open-r1
    ("reward_model",),  # Eurus 2
)
"""Fields of test cases, by data set; the first layout of which a row has a field counts."""

SETUP_FIELDS = ("test_imports", "test_setup_code")
PYTHON3 = 3
"""Number of the language of solutions in CodeContests."""

FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)

EVALUATION_SECONDS = 60.0
"""CPU time for reading the expected values of a row."""

Evaluate = Callable[[Program], Sequence[Outcome]]
"""Runs a program in a sandbox that never runs programs of the policy."""


class ReferenceSandbox:
    """Evaluates expected outputs, in a sandbox that never runs programs of the policy and opens with its first use."""

    def __init__(self, config: SandboxConfig, *, key: str) -> None:
        """Create the sandbox; arguments as for `open_sandbox`."""
        limits = {"output_kib": 2**14, "memory_mib": max(1024, config.memory_mib), "cpu_seconds": 30}
        self._config = config.model_copy(update={**limits, "wall_seconds": max(60.0, config.wall_seconds)})
        self._key = key
        self._sandbox: Sandbox | None = None

    def run(self, program: Program) -> Sequence[Outcome]:
        """Return the outcomes of the program's cases.

        Raises:
            ConfigError: no sandbox works on this machine.
            SandboxError: the sandbox could not be started or was lost.
        """
        if self._sandbox is None:
            self._sandbox = open_sandbox(self._config, key=self._key)
        return self._sandbox.run(program)

    def close(self) -> None:
        """Release the sandbox, if it was opened."""
        if self._sandbox is not None:
            self._sandbox.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTests:
    """The test cases of a row, and the sources around a program that is tested."""

    cases: list[TestCase]
    prefix: str = ""
    """Source before a program."""
    setup: str = ""
    """Source that is executed after a program, before calls."""

    def make_program(self, source: str) -> Program:
        """Return a program with the inputs of the test cases, and without their expected outputs."""
        return Program(
            source=_join(self.prefix, source),
            setup=self.setup,
            cases=[test.case for test in self.cases],
            output_bytes=output_bytes(self.cases),
        )


def load_tests(row: Mapping[str, Any], config: CodeRewardConfig, evaluate: Evaluate) -> RowTests:
    """Return the test cases of a row.

    Args:
        row: the row.
        config: section of the reward term.
        evaluate: runs what has to be evaluated to get an expected output that is no literal.

    Raises:
        TestCaseError: the row has no test cases, or one whose expected output cannot be told apart from its input.
        SandboxError: an expected output could not be evaluated, since there was no sandbox.
    """
    try:
        return _load_tests(row, config, evaluate)
    except RecursionError:
        raise TestCaseError("needs test cases that are not nested so deeply") from None


def _load_tests(row: Mapping[str, Any], config: CodeRewardConfig, evaluate: Evaluate) -> RowTests:
    fields = _test_fields(row, config.tests_field)
    setup = _parse_setup(row, config.setup_field)
    first = row[fields[0]]
    if isinstance(first, str) and "def check(" in first:
        entry_point = row.get("entry_point")
        if not isinstance(entry_point, str):
            raise TestCaseError(f"needs the name of a function in 'entry_point', got {str(entry_point)[:80]!r}")
        found = parse_check_function(first, entry_point, fields[0])
        prefix = _python_prompt(row.get("prompt"))
        return _evaluated(found, row, config, prefix, setup, evaluate, entry_point)
    if isinstance(first, list) and first and all(isinstance(test, str) for test in first):
        found = parse_assertions(first, fields[0])
        return _evaluated(found, row, config, "", setup, evaluate)
    return _parse_cases(row, fields, setup)


def find_solution(row: Mapping[str, Any], field: str | None) -> str | None:
    """Return a reference solution of a row, which goes where a program of the policy does; None: it has none.

    Args:
        row: the row.
        field: its field; `auto`: `code`, `canonical_solution`, or the first of `solutions`.
    """
    if field is None:
        return None
    for name in ("code", "canonical_solution", "solutions") if field == AUTO else (field,):
        match row.get(name):
            case str(source) if name != "solutions":
                return source
            case str(source):
                try:
                    return next((s for s in parse_text(source, name) if isinstance(s, str)), None)
                except (TestCaseError, TypeError):
                    return None
            case {"language": list(languages), "solution": list(sources)}:
                return next((s for n, s in zip(languages, sources, strict=False) if n == PYTHON3), None)
            case [str(source), *_]:
                return source
    return None


def _test_fields(row: Mapping[str, Any], field: str) -> list[str]:
    """Return the fields with a row's test cases that are not empty."""
    layouts = LAYOUTS if field == AUTO else ((field,),)
    for layout in layouts:
        if found := [name for name in layout if row.get(name)]:
            return found
    for name in (name for layout in layouts for name in layout):
        if field != AUTO or name in row:
            raise TestCaseError(f"needs test cases in {name!r}, got {str(row.get(name))[:80]!r}")
    names = ", ".join(name for layout in LAYOUTS for name in layout)
    raise TestCaseError(f"needs test cases in a field of a published layout ({names}), or in tests_field")


def _parse_setup(row: Mapping[str, Any], field: str | None) -> str:
    names = SETUP_FIELDS if field == AUTO else (field,) if field is not None else ()
    given = {name: row[name] for name in names if row.get(name) is not None}
    sources = [
        text_of_lines(value, f"needs source or a list of its lines in {name!r}") for name, value in given.items()
    ]
    return "\n".join(filter(None, sources))


def _python_prompt(prompt: Any) -> str:
    """Return a prompt that is the beginning of the program, as in HumanEval; empty if it is a task in words."""
    if not isinstance(prompt, str):
        return ""
    try:
        statements = ast.parse(prompt).body
    except NO_PYTHON:
        return ""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return prompt if any(isinstance(statement, kinds) for statement in statements) else ""


def _evaluated(
    found: AssertionTests,
    row: Mapping[str, Any],
    config: CodeRewardConfig,
    prefix: str,
    setup: str,
    evaluate: Evaluate,
    entry_point: str = "",
) -> RowTests:
    """Return tests with the expected values of assertions, evaluated with the reference solution of the row."""
    cases = found.cases
    if cases is None:
        solution = find_solution(row, config.solution_field)
        if solution is not None:
            reference = _join(prefix, solution)
        else:  # the function of the prompt has no body
            reference = f"{prefix}\n{entry_point} = None" if entry_point.isidentifier() else prefix
        program = Program(source=reference, setup=f"{setup}\n{found.recording}", cases=[Case(call=f"{RECORDED}()")])
        (outcome,) = evaluate(program)
        if outcome.status != "ok" or not outcome.value:
            raise TestCaseError(f"expected values need to be evaluated without the program: {describe_end(outcome)}")
        try:
            cases = found.cases_of(read_value(outcome.value, GradingClock(EVALUATION_SECONDS)))
        except (UndecidedError, TypeError, *NO_PYTHON) as e:
            raise TestCaseError(f"expected values need to be literals: {str(e)[:200]}") from None
    return RowTests(cases=cases, prefix=prefix, setup="\n".join(filter(None, (found.imports, setup))))


def _parse_cases(row: Mapping[str, Any], fields: Sequence[str], setup: str) -> RowTests:
    """Return tests that are inputs and outputs."""
    function = function_name(row.get("metadata"))
    pairs = [pair for field in fields for pair in find_pairs(row[field], field, function)]
    if not pairs:
        raise TestCaseError(f"needs test cases in {fields[0]!r}, got none")
    has_function = any(pair.function is not None for pair in pairs)
    return RowTests(cases=to_cases(pairs), prefix=PRELUDE if has_function else "", setup=setup)


def _join(prefix: str, source: str) -> str:
    """Return prefix and program as one source; imports from `__future__` have to be first."""
    if not prefix:
        return source
    future = FUTURE.findall(source)
    return "\n".join([*future, prefix, FUTURE.sub("", source) if future else source])
