"""Assertions taken apart give the verdict that executing them gives, and their inputs hold no answer."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from megarl.reward.code_assertions import TestCaseError, parse_assertions, parse_check_function
from megarl.reward.code_grading import is_passed
from megarl.sandbox.sandbox import Case, Outcome
from tests.errors import expect_error

ASSERTIONS = [
    "assert f(1, [2, 3]) == 6",
    "assert f(1, [2, 3]) == -6.0",
    "assert f('a', ['b']) == 'ab'",
    "assert f({1}, [{2}]) == {1, 2}",
    "assert set(f([1], [2])) == set([1, 2])",
    "assert (1, 2) == f((1,), [(2,)])",
    "assert f(None, None) == None",
    "assert f(None, None) is None",
    "assert f(1, [1]) == True",
    "assert f(1, [-1])",
    "assert not f(1, [-1])",
    "assert f([], [['x']])",
    "assert sorted(f([2], [1])) == [1, 2]",
    "assert math.isclose(f(0.1, [0.2]), 0.3)",
    "assert math.isclose(f(0.1, [0.2]), 0.4, rel_tol=0.5)",
    "assert math.isclose(f(1, [2]), 2.9, abs_tol=0.01)",
    "assert math.isclose(f(10**400, [1]), 0.5)",
    "assert abs(f(0.1, [0.2]) - 0.3) < 1e-6",
    "assert math.fabs(0.31 - f(0.1, [0.2])) <= 0.02",
    "assert Counter(f('a', ['ab'])) == {'a': 2, 'b': 1}",
    "assert f(1, [2]) == 3, 'message'",
    "assert f(1, [2]) in [2, 3]",
    "assert f(1, [2]) in (4, 5)",
    "assert f(1, [2]) == 4 or f(1, [2]) == 3",
    "assert f(1, [2]) == 3 and f(1, [3]) == 4",
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

    def passes(test):
        try:
            outcome = Outcome(status="ok", value=repr(eval(test.case.call, names)).removeprefix("Counter"))
        except Exception:  # noqa: BLE001
            outcome = Outcome(status="error")
        return is_passed(test, outcome)

    cases = parse_assertions([source], "test_list").cases
    assert all(map(passes, cases)) == expected


@pytest.mark.parametrize(
    "source",
    [
        "assert f(3) == 48611",
        "assert 48611 == f(3)",
        "assert f(3) is 48611",
        "assert f(3) in [48611]",
        "assert math.isclose(f(3), 48611, rel_tol=0.1)",
        "assert abs(f(3) - 48611) < 1",
        "assert f(3) == pytest.approx(48611)",
    ],
)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_the_input_has_no_answer(source):
    (test,) = parse_assertions([source], "test_list").cases
    assert (test.case, test.expected) == (Case(call="f(3)"), 48611)
    check = f"def check(candidate):\n    {source.replace('f(3)', 'candidate(3)')}"
    (test,) = parse_check_function(check, "f", "test").cases
    assert (test.case, test.expected) == (Case(call="f(3)"), 48611)


@pytest.mark.parametrize(
    "source",
    [
        "assert 1 == 1",
        "assert f(1) != 2",
        "assert f(1) > 2",
        "assert not f(1) == 2",
        "assert isinstance(f(1), list)",
        "assert all(x in [1, 2] for x in f(1))",
        "assert judge(f(1), [1, 2])",
        "assert set(f(1)).issubset({1})",
        "assert f(1) == 1 or g(1) == 2",
        "f(1) == 2",
        "assert",
        "x = f(1)\nassert x == 2",
    ],
)
def test_refuses_what_cannot_be_taken_apart(source):
    with expect_error(TestCaseError, "test_list[1]"):
        parse_assertions(["assert f(1) == 2", source], "test_list")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("x = candidate(1)\n    assert x == 2", "needs an assertion that compares a call"),
        ("candidate(1)\n    assert candidate(2) == 2", "calls the program outside of an assertion"),
        ("assert candidate(1) == candidate(2)", "needs an assertion that compares a call"),
        ("assert abs(poly(candidate(1))) < 1e-4", "needs an assertion that compares a call"),
        ("assert len([c for c in [1] if candidate(c)]) != 1", "needs an assertion that compares a call"),
        ("assert candidate(1).issubset({1})", "needs an assertion that compares a call"),
        ("assert isinstance(candidate(1), list)", "needs an assertion that compares a call"),
        ("assert True", "has no assertion about the program"),
        ("pass", "has no assertion about the program"),
    ],
)
def test_refuses_checks_that_see_the_program_and_its_answers_together(body, reason):
    with pytest.raises(TestCaseError, match=f"test {reason}"):
        parse_check_function(f"def check(candidate):\n    {body}", "f", "test")


def test_refuses_sources_without_a_check():
    with expect_error(TestCaseError, "0", "function", "needs"):
        parse_check_function("def test_f():\n    assert f(1) == 2", "f", "test")
    with expect_error(TestCaseError, "Python", "entry", "point"):
        parse_check_function("def check(candidate", "f", "test")
