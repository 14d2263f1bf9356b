"""Test cases taken apart give the verdict that executing the assertion gives, and their inputs hold no answer."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from megarl.reward.code.grading import is_passed
from megarl.reward.code.test_cases import TestCaseError, parse_assertion, parse_tests
from megarl.sandbox.guest.program import _plain
from megarl.sandbox.sandbox import Case, Outcome

ASSERTIONS = [
    "assert f(1, [2, 3]) == 6",
    "assert f(1, [2, 3]) == -6.0",
    "assert f('a', ['b']) == 'ab'",
    "assert f({1}, [{2}]) == {1, 2}",
    "assert set(f([1], [2])) == set([1, 2])",
    "assert (1, 2) == f((1,), [(2,)])",
    "assert f(None, None) == None",
    "assert f(1, [1]) == True",
    "assert f(1, [-1])",
    "assert not f(1, [-1])",
    "assert sorted(f([2], [1])) == [1, 2]",
    "assert math.isclose(f(0.1, [0.2]), 0.3)",
    "assert math.isclose(f(0.1, [0.2]), 0.4, rel_tol=0.5)",
    "assert math.isclose(f(1, [2]), 2.9, abs_tol=0.01)",
    "assert Counter(f('a', ['ab'])) == {'a': 2, 'b': 1}",
    "assert f(1, [2]) == 3, 'message'",
]


def add(first, rest):
    for other in rest or []:
        first = first | other if isinstance(first, set) else first + other
    return first


def wrong(first, rest):
    return 7


def fail(first, rest):
    raise KeyError(first)


@pytest.mark.parametrize("function", [add, wrong, fail])
@pytest.mark.parametrize("source", ASSERTIONS)
def test_agrees_with_executing_the_assertion(source, function):
    names = {"f": function, "math": math, "Counter": Counter}
    try:
        exec(source, names)
        expected = True
    except Exception:  # noqa: BLE001 -- whatever the assertion meets
        expected = False
    test = parse_assertion(source, "test_list[0]")
    try:
        outcome = Outcome(status="ok", value=repr(_plain(eval(test.case.call, names))))
    except Exception:  # noqa: BLE001
        outcome = Outcome(status="error")
    assert is_passed(test, outcome) == expected


def test_the_input_has_no_answer():
    for source in ("assert f(3) == 48611", "assert 48611 == f(3)", "assert math.isclose(f(3), 48611, rel_tol=0.1)"):
        assert parse_assertion(source, "test_list[0]").case == Case(call="f(3)")


@pytest.mark.parametrize(
    "source",
    [
        "assert f(1) == g(1)",
        "assert 1 == 1",
        "assert f(1) != 2",
        "assert f(1) == 1 and f(2) == 2",
        "assert f(1) in [1, 2]",
        "assert math.isclose(f(1), g(1))",
        "f(1) == 2",
        "assert",
        "x = f(1)\nassert x == 2",
    ],
)
def test_refuses_what_cannot_be_taken_apart(source):
    with pytest.raises(TestCaseError, match=r"test_list\[0\] needs an assertion that compares a call with a literal"):
        parse_tests({"test_list": [source]}, "test_list")


def test_reads_inputs_and_calls():
    row = {"tests": [{"input": "1 2\n", "output": "3"}, {"call": "f(1)", "expected": [1]}]}
    tests = parse_tests(row, "tests")
    assert [test.case for test in tests] == [Case(stdin="1 2\n"), Case(call="f(1)")]
    assert is_passed(tests[0], Outcome(status="ok", stdout="3  \n\n"))
    assert not is_passed(tests[0], Outcome(status="error", stdout="3"))
    assert not is_passed(tests[1], Outcome(status="ok", value="[1"))
    assert not is_passed(tests[1], Outcome(status="ok", value="(" * 10_000))
    for bad in ({}, {"tests": []}, {"tests": "assert f(1) == 1"}):
        with pytest.raises(TestCaseError, match="needs a list of test cases in 'tests'"):
            parse_tests(bad, "tests")
    with pytest.raises(TestCaseError, match=r"tests\[0\] needs an assertion, \{input, output\} of text"):
        parse_tests({"tests": [{"input": 1, "output": 2}]}, "tests")
