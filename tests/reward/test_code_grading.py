"""Grades of what programs return and print: the verdict of Python's own assertion, and none of them an exception."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter, OrderedDict
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

import pytest

from megarl.reward import code_grading
from megarl.reward.code_grading import TestCase, Tolerance, grade, is_passed, output_bytes, run_tests
from megarl.sandbox.guest.program import plain_value
from megarl.sandbox.sandbox import Case, Outcome, Program
from megarl.sandbox.tiers import LocalSandbox
from tests.hostile_texts import hostile_texts
from tests.sandbox.local_tiers import best_tier, patience, patient_limits

VALUES = [
    10**400,
    -(10**400),
    2**64,
    True,
    0.5,
    -0.0,
    math.nan,
    math.inf,
    [math.inf, -math.inf],
    [math.nan],
    1j,
    complex(1, -2),
    complex(math.inf, math.nan),
    Fraction(1, 2),
    Fraction(4, 2),
    Decimal("0.5"),
    Decimal("NaN"),
    Decimal("sNaN"),
    Decimal("1e999999"),
    [Fraction(1, 2), {Decimal(2): (1,)}],
    {1, 2},
    frozenset({1, 2}),
    {frozenset({1, 2})},
    {(frozenset({1}), 2): [frozenset({3})]},
    set(),
    {1: "a"}.keys(),
    {1: 2}.items(),
    MappingProxyType({1: [2]}),
    bytearray(b"ab"),
    memoryview(b"ab"),
    b"ab",
    Counter("aab"),
    OrderedDict(b=1),
    "a'\"\\\n\ud800\x00\u2028",
    "",
    None,
    (1,),
    [(1, 2), [3]],
    [],
    {"a": None},
]
EXPECTED = [0.5, 2, 10**400, 1, True, 0.0, None, "", b"ab", [], (1,), {1, 2}, set(), {(1, 2)}, {frozenset({1, 2})}]
EXPECTED += [{1: [2]}, {"a": 2, "b": 1}, {"b": 1}, {"a": None}, [(1, 2), [3]], [0.5, {2: (1,)}], [math.inf, -math.inf]]
EXPECTED += [1j, complex(1, -2), math.inf, "a'\"\\\n\ud800\x00\u2028", 2**64]
TOLERANCES = [None, Tolerance(relative=0.001)]


def returned(value: object) -> Outcome:
    """Return the outcome of a call that returns the value."""
    try:
        return Outcome(status="ok", value=repr(plain_value(value)))
    except (TypeError, ValueError):
        return Outcome(status="error")


@pytest.mark.parametrize("tolerance", TOLERANCES, ids=["equal", "close"])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_returned_value_gets_the_verdict_of_the_assertion(value, tolerance):
    for expected in EXPECTED:
        if tolerance is not None and not isinstance(expected, int | float):
            continue
        try:
            verdict = value == expected if tolerance is None else math.isclose(value, expected, rel_tol=0.001)
        except (ArithmeticError, TypeError, ValueError):
            verdict = False
        if tolerance is not None and isinstance(value, int | float) and abs(value) > 1e300:
            verdict = value == expected  # beyond floats, where isclose raises
        test = TestCase(case=Case(call="f()"), expected=expected, tolerance=tolerance)
        assert is_passed(test, returned(value)) == verdict, expected


@pytest.mark.parametrize("value", [re.match("a", "a"), re.match("a", "b"), object(), range(0), range(2), Fraction(0)])
def test_the_truth_of_any_object_is_a_value(value):
    """The call of `assert f(x)` is `not not f(x)`, since an object has no literal."""
    test = TestCase(case=Case(call="not not f()"), expected=True)
    assert is_passed(test, returned(bool(value))) == bool(value)


FORGED = {
    "parentheses": "(" * 3000 + "1" + ")" * 3000,
    "brackets": "[" * 60_000,
    "nested lists": "[" * 90 + "1" + "]" * 90,
    "nested dicts": "{1:" * 2000 + "1" + "}" * 2000,
    "sum": "1" + "+1" * 30_000,
    "minus": "-" * 60_000 + "1",
    "digits": "9" * 60_000,
    "hexadecimal digits": "0x" + "f" * 60_000,
    "float of digits": "9" * 60_000 + ".0",
    "unhashable": "{[1]}",
    "unhashable key": "{[1]: 2}",
    "expansion": "{**{1: 2}}",
    "star": "[*[1]]",
    "null": "'\x00'",
    "surrogate": "'\ud800'",
    "bytes beyond ascii": "b'\xff'",
    "escapes": "'\\N{x}'",
    "call": "__import__('os').system('exit 1')",
    "call of a method": "set().union([1])",
    "keyword": "set(x=1)",
    "name": "x",
    "text of numbers": "-'1'",
    "true sum": "True+True",
    "power": "9**9**9",
    "shift": "1<<10**9",
    "repetition": "'x'*10**9",
    "comprehension": "[x for x in ()]",
    "lambda": "lambda: 1",
    "format": "f'{1}'",
    "wrong decimal": "Decimal('x')",
    "huge decimal": "Decimal('1e999999999999999999')",
    "fraction by zero": "Fraction(1, 0)",
    "fraction of an exponent": "Fraction('1e99999999999')",
    "fraction of a decimal": "Fraction(Decimal('1e99999999999'))",
    "decimal of a number": "Decimal(1e308)",
    "list of a fraction of an exponent": "[Fraction('1e99999999999')]",
    "signalling": "Decimal('sNaN')",
    "set of it": "{Decimal('sNaN')}",
    "two values": "1\n2",
    "indented": "  1",
    "nothing": "",
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_value_is_graded_and_not_executed(name):
    outcome = Outcome(status="ok", value=FORGED[name])
    for expected in (2, "x", [1], {1: 2}, {1, 2}, 0.5):
        for tolerance in TOLERANCES:
            test = TestCase(case=Case(call="f()"), expected=expected, tolerance=tolerance, as_json=True)
            assert grade(test, outcome) in ("failed", "undecided")


def test_any_text_is_graded():
    for text in hostile_texts().values():
        for call in (None, "f()"):
            test = TestCase(case=Case(call=call), expected="24681357", tolerance=Tolerance())
            assert not is_passed(test, Outcome(status="ok", stdout=text, value=text))


@pytest.mark.parametrize(
    "text", ["set([1])", "set((1,))", "frozenset([1])", "set({1: 2})", "frozenset(frozenset({1}))"]
)
def test_sets_are_read_as_repr_writes_them(text):
    """A set that is made of another collection would not be looked at for members that collide."""
    test = TestCase(case=Case(call="f()"), expected={1})
    assert grade(test, Outcome(status="ok", value=text)) == "failed"
    assert is_passed(test, returned({1}))
    assert is_passed(TestCase(case=Case(call="f()"), expected={frozenset({1})}), returned({frozenset({1})}))
    assert is_passed(TestCase(case=Case(call="f()"), expected=set()), returned(set()))


COLLIDING = [i * (2**61 - 1) for i in range(1, 3000)]


@pytest.mark.parametrize("text", ["{%s}", "{%s: 0}", "frozenset({%s})", "[{%s}]", "{(1, 2): {%s}}"])
def test_members_that_collide_are_not_compared(text):
    members = (": 0, " if ": 0" in text else ", ").join(map(str, COLLIDING))
    assert len({hash(n) for n in COLLIDING}) == 1
    test = TestCase(case=Case(call="f()"), expected=1)
    assert grade(test, Outcome(status="ok", value=text % members)) == "undecided"
    assert is_passed(TestCase(case=Case(call="f()"), expected=set(range(9999))), returned(set(range(9999))))


@pytest.mark.parametrize("outcome", [Outcome(status="ok", value="[1]"), Outcome(status="ok", stdout="1")])
def test_a_case_has_a_limit_of_cpu_time(outcome, monkeypatch):
    test = TestCase(case=Case(call="f()" if outcome.value else None), expected=[1] if outcome.value else "1")
    assert grade(test, outcome) == "passed"
    monkeypatch.setattr(code_grading, "GRADING_SECONDS", -1.0)
    assert grade(test, outcome) == "undecided"


def test_values_are_read_as_literal_eval_reads_them():
    for value in VALUES:
        text = returned(value).value
        try:
            expected = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            continue
        found = code_grading.read_value(text, code_grading.GradingClock())
        assert (repr(found), type(found)) == (repr(expected), type(expected))


def test_runs_cases_until_one_fails():
    sandbox = LocalSandbox(best_tier(), patient_limits())
    tests = [TestCase(case=Case(stdin=text), expected=text) for text in "abc"]
    program = Program(source="x = input()\nprint(x if x != 'b' else 1)", cases=[test.case for test in tests])
    with patience():
        assert run_tests(sandbox, program, tests) == ["passed", "failed", "passed"]
        assert run_tests(sandbox, program, tests, stop_at_failure=True) == ["passed", "failed"]


def test_the_longest_accepted_output_has_room():
    tests = [TestCase(case=Case(), expected="x"), TestCase(case=Case(), expected="y", others=("é" * 5000,))]
    assert output_bytes(tests) > 10_000
    assert output_bytes([TestCase(case=Case(call="f()"), expected=["x" * 5000])]) > 5000
