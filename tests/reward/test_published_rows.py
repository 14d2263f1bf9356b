"""Rows as they are published are graded as they mean it, and those that cannot be are refused with the reason."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from megarl.config.reward import CodeRewardConfig
from megarl.data.rows import read_rows
from megarl.reward.code_assertions import TestCaseError
from megarl.reward.code_grading import Tolerance, describe_failure, is_passed, is_same_text
from megarl.reward.test_cases import ReferenceSandbox, RowTests, find_solution, load_tests
from megarl.sandbox.sandbox import Outcome
from tests import mbpp
from tests.reward.published_rows import PUBLISHED_ROWS
from tests.sandbox.local_tiers import PATIENT, patience

CONFIG = CodeRewardConfig.model_validate({"type": "code", "sandbox": {"allow_unsafe": True, **PATIENT}})


@pytest.fixture(scope="module")
def sandbox():
    with patience():
        opened = ReferenceSandbox(CONFIG.sandbox, key="sandbox")
        yield opened
        opened.close()


def find_failures(tests: RowTests, program: str, sandbox: ReferenceSandbox) -> list[str]:
    outcomes = sandbox.run(tests.make_program(program))
    pairs = zip(tests.cases, outcomes, strict=True)
    return [describe_failure(test, outcome) for test, outcome in pairs if not is_passed(test, outcome)]


@pytest.mark.parametrize("name", PUBLISHED_ROWS)
def test_published_rows_are_graded(name, sandbox):
    row, right, wrong = PUBLISHED_ROWS[name]
    tests = load_tests(row, CONFIG, sandbox.run)
    solution = find_solution(row, CONFIG.solution_field)
    for program in [*right, *([] if solution is None else [solution])]:
        assert find_failures(tests, program, sandbox) == [], program
    for program in wrong:
        assert find_failures(tests, program, sandbox), program


def test_programs_get_no_expected_value(sandbox):
    row = {
        "prompt": "def f(x):\n    pass",
        "canonical_solution": "def f(x): return 48611 * x",
        "entry_point": "f",
        "test": "def check(candidate):\n    results = [48611]\n    for x in (1, 2):\n"
        "        assert candidate(x) == results[0] * x\n",
    }
    tests = load_tests(row, CONFIG, sandbox.run)
    assert [test.expected for test in tests.cases] == [[48611, 97222]]
    program = str(tests.make_program("def f(x): return x"))
    assert "48611" not in program
    assert "97222" not in program


class Executed:
    """A pickle that runs a command when it is loaded."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


REFUSED = {
    "needs test cases in a field of a published layout": {"text": "?"},
    "needs test cases in 'tests', got '[]'": {"tests": []},
    "needs the name of a function in 'entry_point', got 'None'": {"test": "def check(candidate): pass"},
    "compares a call of the program with an expected value": {
        "test": "def check(f):\n    for n in range(3):\n        x = f(n)\n        assert abs(poly(n, x)) < 1e-4",
        "entry_point": "g",
    },
    "expected values need to be evaluated without the program: fails: NameError: name 'g' is not defined": {
        "test_list": ["assert f(1) == g(1)"]
    },
    "expected values need to be evaluated without the program: fails: TypeError": {
        "test": "def check(candidate):\n    assert candidate(1) == f(1)",
        "entry_point": "f",
        "prompt": "def f(x):\n    '''doc'''\n",
    },
    "needs one output per input, got 1 for 2": {"input_output": '{"inputs": ["1", "2"], "outputs": ["1"]}'},
    "input_output needs JSON, or JSON in zlib and base64": {"input_output": "1 2"},
    "private_test_cases needs JSON, or JSON in zlib and base64": {
        "public_test_cases": "[]",
        "private_test_cases": packed(pickle.dumps(Executed())),
    },
    "private_test_cases needs JSON, or JSON in zlib": {"private_test_cases": packed(pickle.dumps(["[]", "[]"]))},
    "needs programs in Python, its language is 'cpp'": {"verification_info": {"language": "cpp", "test_cases": []}},
    "tests[0] needs texts as the input and the output, got '1'": {"tests": [{"input": 1, "output": "2"}]},
    "tests[1] needs {input, output} or {call, expected}": {"tests": [{"input": "", "output": ""}, {"input": ""}]},
    "tests[0] needs an expression in 'call', got 'f('": {"tests": [{"call": "f(", "expected": 1}]},
    "needs the name of the function that its input is for": {
        "public_test_cases": '[{"input": "1", "output": "1", "testtype": "functional"}]'
    },
    "needs the name of a function, got 'f(1) or g'": {
        "input_output": '{"fn_name": "f(1) or g", "inputs": [[1]], "outputs": [1]}'
    },
    "needs the type stdin or functional, got 'interactive'": {
        "tests": [{"input": "1", "output": "1", "type": "interactive"}]
    },
    "needs source or a list of its lines in 'test_setup_code', got '7'": {
        "test_list": ["assert f(1) == 1"],
        "test_setup_code": 7,
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_rows_that_cannot_be_graded_are_refused_with_the_reason(reason, sandbox):
    with pytest.raises(TestCaseError) as caught:
        load_tests(REFUSED[reason], CONFIG, sandbox.run)
    assert reason in str(caught.value)


DEEP = "[" * 100_000
NESTED = json.loads("[" * 700 + "0.5" + "]" * 700)
JUNK = [
    None,
    True,
    7,
    0.5,
    "",
    "x = ",
    "[",
    "{}",
    "[[]]",
    "null",
    DEEP,
    NESTED,
    "(" * 300 + ")" * 300,
    [],
    [[]],
    [None],
    {},
    {"": 1},
]


def damaged(value: Any) -> Iterator[Any]:
    """Yield copies of a value in which one part, at any depth, is junk or missing; JSON text is looked into."""
    yield from JUNK
    if isinstance(value, str) and value.startswith(("[{", "{")):
        yield from (json.dumps(each) for each in damaged(json.loads(value)))
    elif isinstance(value, dict):
        for key in value:
            yield {name: item for name, item in value.items() if name != key}
            yield from ({**value, key: each} for each in damaged(value[key]))
    elif isinstance(value, list) and value:
        yield from ([each, *value[1:]] for each in damaged(value[0]))


@pytest.mark.parametrize("name", PUBLISHED_ROWS)
def test_damaged_rows_are_graded_or_refused(name):
    messages = []

    def evaluate(program):
        return [Outcome(status="ok", value="[(0, {}, [1], None, None)]")]

    for row in damaged(PUBLISHED_ROWS[name].row):
        if not isinstance(row, dict):
            continue
        try:
            load_tests(row, CONFIG, evaluate).make_program("pass")
        except TestCaseError as e:
            messages.append(str(e))
        find_solution(row, "auto")
    assert max(map(len, messages)) < 1000


@pytest.mark.parametrize(
    ("text", "expected", "same"),
    [
        ("3.0", "3", True),
        ("3", "3.000", True),
        ("0.33333333", "0.3333333333", True),
        ("0.333", "0.3333333333", False),
        ("Case #1: 0.50000001", "Case #1: 0.5", True),
        ("1000000.5", "1000000", False),
        ("1e400", "1", False),
        ("9" * 5000, "1", False),
        ("nan", "1.5", False),
        ("1_0", "10", False),
        ("1  2", "1 2", True),
        ("  *\n ***", " *\n***", False),
        ("a  b", "a b", False),
        ("a \r\nb\n\n", "a\nb", True),
        ("a\n\nb", "a\nb", False),
        ("yes", "YES", False),
    ],
)
def test_printed_texts_are_compared(text, expected, same):
    tolerance = Tolerance(relative=1e-6, absolute=1e-6) if "." in expected else None
    assert is_same_text(text, expected, tolerance) == same


def test_large_integers_need_to_be_equal():
    assert not is_same_text("50000000000000001", "50000000000000000", None)


@pytest.fixture(scope="module")
def published():
    return [row.fields for row in read_rows(mbpp.PUBLISHED)]


@mbpp.needs_published
def test_all_rows_of_mbpp_as_published_can_be_graded(published, sandbox):
    evaluated = []

    def evaluate(program):
        evaluated.append(program)
        return sandbox.run(program)

    assert len([load_tests(row, CONFIG, evaluate) for row in published]) == mbpp.NUM_ROWS
    assert len(evaluated) == 1  # row 596, which expects sys.getsizeof(...)


NUMBERS = (367, 596, 927, *range(50, mbpp.NUM_ROWS, 100))
"""Rows with setup code, with expected values that are no literals, and some others."""


@mbpp.needs_published
@pytest.mark.parametrize(
    "numbers", [pytest.param(NUMBERS, id="some"), pytest.param(range(1, 975), id="all", marks=pytest.mark.slow)]
)
def test_reference_solutions_of_mbpp_as_published_pass(numbers, published, sandbox):
    failed = {}
    for number in numbers:
        row = published[number - 1]
        tests = load_tests(row, CONFIG, sandbox.run)
        if failures := find_failures(tests, row["code"], sandbox):
            failed[row["task_id"]] = failures
    assert failed == {}
