"""Test cases of a row: inputs, which go into a sandbox, separated from expected outputs, which do not."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.reward.code.grading import TestCase, Tolerance
from megarl.sandbox.sandbox import Case, Program

COLLECTIONS = {"set": set, "tuple": tuple, "list": list, "frozenset": frozenset, "dict": dict}
"""Built-in types whose calls on a literal are literals too."""

NUM_OPERANDS = 2


class TestCaseError(ValueError):
    """A test case cannot be taken apart into an input and an expected output."""

    __test__ = False


def parse_tests(row: Mapping[str, Any], field: str) -> list[TestCase]:
    """Return the test cases in a field of a row.

    Raises:
        TestCaseError: the field is missing, empty, or has a test case that cannot be taken apart.
    """
    tests = row.get(field)
    if not isinstance(tests, list) or not tests:
        raise TestCaseError(f"needs a list of test cases in {field!r}, got {str(tests)[:80]!r}")
    return [_parse(test, f"{field}[{i}]") for i, test in enumerate(tests)]


def parse_setup(row: Mapping[str, Any], field: str | None) -> str:
    """Return the source that is executed before the program of a row; empty without one.

    Raises:
        TestCaseError: the field has neither source nor a list of lines.
    """
    setup = None if field is None else row.get(field)
    match setup:
        case None:
            return ""
        case str():
            return setup
        case list() if all(isinstance(line, str) for line in setup):
            return "\n".join(setup)
        case _:
            raise TestCaseError(f"needs source or a list of its lines in {field!r}, got {str(setup)[:80]!r}")


def make_program(source: str, setup: str, tests: Sequence[TestCase]) -> Program:
    """Return a program with the inputs of test cases, and without their expected outputs."""
    return Program(source=source, setup=setup, cases=[test.case for test in tests])


def _parse(test: object, where: str) -> TestCase:
    match test:
        case str():
            return parse_assertion(test, where)
        case {"input": str(text), "output": str(expected)}:
            return TestCase(case=Case(stdin=text), expected=expected)
        case {"call": str(call), "expected": expected}:
            return TestCase(case=Case(call=_expression(call, where)), expected=expected)
        case _:
            raise TestCaseError(
                f"{where} needs an assertion, {{input, output}} of text, or {{call, expected}}, got {str(test)[:120]!r}"
            )


def _expression(source: str, where: str) -> str:
    try:
        ast.parse(source.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise TestCaseError(f"{where} needs an expression in 'call', got {source[:120]!r}") from None
    return source.strip()


def parse_assertion(source: str, where: str) -> TestCase:
    """Return the test case of an assertion: `assert CALL == LITERAL`, with `math.isclose`, or of the truth of a call.

    Raises:
        TestCaseError: it is none of these, so that the expected output cannot be kept out of the sandbox.
    """
    try:
        (statement,) = ast.parse(source.strip()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _refuse(source, where) from None
    if not isinstance(statement, ast.Assert):
        raise _refuse(source, where)
    match statement.test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return _parse_equality(left, right, source, where)
        case ast.UnaryOp(op=ast.Not(), operand=call):
            return TestCase(case=Case(call=ast.unparse(call)), expected=False, as_truth=True)
        case ast.Call(func=ast.Attribute(attr="isclose") | ast.Name(id="isclose")) as call:
            return _parse_closeness(call, source, where)
        case ast.Call() as call:
            return TestCase(case=Case(call=ast.unparse(call)), expected=True, as_truth=True)
        case _:
            raise _refuse(source, where)


def _parse_equality(left: ast.expr, right: ast.expr, source: str, where: str) -> TestCase:
    literals = [(side, _literal(side)) for side in (right, left)]
    known = [(side, value) for side, (is_literal, value) in literals if is_literal]
    if len(known) != 1:
        raise _refuse(source, where)
    side, expected = known[0]
    return TestCase(case=Case(call=ast.unparse(left if side is right else right)), expected=expected)


def _parse_closeness(call: ast.Call, source: str, where: str) -> TestCase:
    found = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
    if len(call.args) != NUM_OPERANDS or not found.keys() <= {"rel_tol", "abs_tol"}:
        raise _refuse(source, where)
    is_literal, expected = _literal(call.args[1])
    if not is_literal or not isinstance(expected, int | float) or not all(known for known, _ in found.values()):
        raise _refuse(source, where)
    tolerances = {name: value for name, (_, value) in found.items()}
    return TestCase(
        case=Case(call=ast.unparse(call.args[0])),
        expected=expected,
        tolerance=Tolerance(relative=tolerances.get("rel_tol", 1e-9), absolute=tolerances.get("abs_tol", 0.0)),
    )


def _literal(node: ast.expr) -> tuple[bool, Any]:
    """Return whether an expression is a literal, or a collection made of one, and its value."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in COLLECTIONS and len(args) <= 1:
            inner = [_literal(argument) for argument in args]
            if not all(known for known, _ in inner):
                return False, None
            try:
                return True, COLLECTIONS[name](*(value for _, value in inner))
            except (TypeError, ValueError):
                return False, None
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None


def _refuse(source: str, where: str) -> TestCaseError:
    return TestCaseError(
        f"{where} needs an assertion that compares a call with a literal, so that the literal stays outside of the "
        f"sandbox, got {source[:200]!r}"
    )
