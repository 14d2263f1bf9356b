"""Rows in the exact form in which data sets are published: fields, nesting and encodings; the tasks are our own."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any, NamedTuple


class PublishedRow(NamedTuple):
    """A row with programs that its tests accept and refuse."""

    row: dict[str, Any]
    right: list[str]
    wrong: list[str]


def compressed(cases: list[dict[str, Any]]) -> str:
    """Return test cases as LiveCodeBench publishes the private ones."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


PLUS_FUNCTIONS = """
import numpy as np

def is_floats(x) -> bool:
    # check if it is float; List[float]; Tuple[float]
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False


def assertion(out, exp, atol):
    exact_match = out == exp

    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match

"""

HALVES = {
    "task_id": "HumanEval/900",
    "prompt": 'from typing import List\n\n\ndef halves(numbers: List[int]) -> List[float]:\n    """ Return halves.\n'
    '    >>> halves([2])\n    [1.0]\n    """\n',
    "canonical_solution": "    return [n / 2 for n in numbers]\n",
    "entry_point": "halves",
}

ROOT_SETUP = "root = Pair(1, Pair(2)) \r\nroot1 = Pair(3)"

GREET = {"stdin": "Ann\nBob\n", "stdout": "Hello Ann\nHello Bob\n"}
GREETS = "import sys\nfor line in sys.stdin:\n    print('Hello', line.strip(), end=' \\n')"
HALF = "print(int(input()) / 2)"
TWO_SUM = "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        "

PUBLISHED_ROWS: dict[str, PublishedRow] = {
    "mbpp with setup code that uses the program": PublishedRow(
        row={
            "text": "Write a function to count linked pairs.",
            "code": "class Pair:\r\n    def __init__(self, x, rest=None):\r\n        self.rest = rest\r\n"
            "def count(p):\r\n    return 0 if p is None else 1 + count(p.rest)",
            "task_id": 900,
            "test_setup_code": ROOT_SETUP,
            "test_list": ["assert count(root) == 2", "assert (count(root1)) == 1"],
            "challenge_test_list": [],
        },
        right=["class Pair:\n    def __init__(self, x, *rest): self.n = 1 + len(rest)\ndef count(p): return p.n"],
        wrong=["def count(p): return 2", "class Pair:\n    def __init__(self, *_): pass\ndef count(p): return 2"],
    ),
    "mbpp with an expected value that is no literal": PublishedRow(
        row={
            "text": "Write a function to find the size of a tuple.",
            "code": "import sys \r\ndef size(t):\r\n  return sys.getsizeof(t)",
            "task_id": 901,
            "test_setup_code": "",
            "test_list": ["assert size((1, 2)) == sys.getsizeof((1, 2))", "assert size(()) == sys.getsizeof(())"],
            "challenge_test_list": [],
        },
        right=["def size(t): return ().__sizeof__() + 8 * len(t) + 16"],
        wrong=["def size(t): return 56", "class sys:\n    getsizeof = len\nsize = len"],
    ),
    "mbpp sanitized": PublishedRow(
        row={
            "source_file": "Benchmark Questions Verification V2.ipynb",
            "task_id": 902,
            "prompt": "Write a function to find the circumference of a circle.",
            "code": "import math\ndef around(r):\n    return 2 * math.pi * r",
            "test_imports": ["import math", "from math import tau"],
            "test_list": ["assert math.isclose(around(10), 62.83, rel_tol=0.001)", "assert around(tau - tau) == 0"],
        },
        right=["def around(r): return 6.2831 * r"],
        wrong=["def around(r): return 6.2 * r", "def around(r): return 62.83"],
    ),
    "humaneval": PublishedRow(
        row={
            **HALVES,
            "test": "\n\nMETADATA = {\n    'author': 'jt',\n    'dataset': 'test'\n}\n\n\ndef check(candidate):\n"
            "    assert candidate([1, 2]) == [0.5, 1.0]\n    assert abs(candidate([3])[0] - 1.5) < 1e-6\n"
            "    assert candidate([]) == [], 'This prints if this assert fails'\n    assert not candidate([])\n"
            "    assert candidate([1])\n    assert True, 'also good for debugging!'\n"
            "    for x in range(2, 6):\n        assert candidate([2 * x, x]) == [float(x), x / 2]\n"
            "    assert tuple(candidate([8])) == tuple(halves([8]))\n\n",
        },
        right=[
            "def halves(numbers: List[int]) -> List[float]:\n    return [n / 2 for n in numbers]",
            "from __future__ import annotations\ndef halves(n: Vector) -> Vector: return [*map(0.5.__mul__, n)]",
            "    return [n * .5 for n in numbers]",
        ],
        wrong=["def halves(numbers): return []", "def halves(numbers): return [n // 2 for n in numbers]", "    pass"],
    ),
    "humaneval without a solution, of a method": PublishedRow(
        row={
            "task_id": "two",
            "prompt": "import random\nfrom typing import *\n\n",
            "entry_point": "Solution().both",
            "test": "def check(candidate):\n    assert candidate(a = 1, b = [2]) == [1, 2]\n"
            "    assert candidate(a = 0, b = []) is not None or True\n".replace(
                "    assert candidate(a = 0, b = []) is not None or True\n",
                "    assert candidate(a = 0, b = []) == [0]\n",
            ),
        },
        right=["class Solution:\n    def both(self, a: int, b: List[int]): return [a, *b]"],
        wrong=["class Solution:\n    def both(self, a, b): return b", "def both(a, b): return [a, *b]"],
    ),
    "humaneval+": PublishedRow(
        row={
            **HALVES,
            "test": f"\n\n{PLUS_FUNCTIONS}\ndef check(candidate):\n"
            f"    inputs = {[[[i, i + 1]] for i in range(70)]}\n"
            f"    results = {[[i / 2, (i + 1) / 2] for i in range(70)]}\n"
            "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n        assertion(candidate(*inp), exp, 0)\n",
        },
        right=["def halves(numbers): return [n / 2 + 1e-9 for n in numbers]", "    return [n / 2 for n in numbers]"],
        wrong=["def halves(n): return [n[0] / 2 + 1e-3]", "def halves(n): return [0.0, 0.5] if n == [0, 1] else [9.0]"],
    ),
    "humaneval+ with a reference function": PublishedRow(
        row={
            **HALVES,
            "test": f"\n\n{PLUS_FUNCTIONS}\ndef ref_func(numbers):\n    return [n / 2 for n in numbers]\n\n\n"
            "def check(candidate):\n    inputs = [[[1]], [[2, 3]], [[]]]\n    for i, inp in enumerate(inputs):\n"
            "        assertion(candidate(*inp), ref_func(*inp), 0)\n",
        },
        right=["def halves(numbers): return [n / 2 for n in numbers]"],
        wrong=["def ref_func(n): return []\nhalves = ref_func"],
    ),
    "apps stdin": PublishedRow(
        row={
            "problem_id": 900,
            "question": "Greet.",
            "solutions": json.dumps([GREETS, "print()"]),
            "input_output": json.dumps(
                {"inputs": [GREET["stdin"], "Cy\n"], "outputs": [GREET["stdout"], "Hello Cy\n"]}
            ),
            "difficulty": "introductory",
            "url": "",
            "starter_code": "",
        },
        right=[GREETS, "while True:\n    try: print('Hello ' + input())\n    except EOFError: break"],
        wrong=["print('Hello Cy')", "print('hello', input())"],
    ),
    "apps stdin with lists of lines": PublishedRow(
        row={"input_output": json.dumps({"inputs": [["Ann", "Bob"]], "outputs": [["Hello Ann", "Hello Bob"]]})},
        right=[GREETS],
        wrong=["print('Hello Ann')"],
    ),
    "apps function, outputs in lists": PublishedRow(
        row={
            "solutions": json.dumps(["def most(names, n):\n    return max(names)"]),
            "input_output": json.dumps(
                {"fn_name": "most", "inputs": [[["a", "b"], 1], [["c"], 2]], "outputs": [["b"], ["c"]]}
            ),
            "starter_code": "def most(names, n):\n\t",
        },
        right=[
            "def most(names: List[str], n): return max(names)",
            "class Solution:\n    def most(self, a, n): return max(a)",
        ],
        wrong=["def most(names, n): return 'b'", "def other(names, n): return max(names)"],
    ),
    "taco function": PublishedRow(
        row={
            "question": "?",
            "solutions": json.dumps(["def edges(g):\n    return {1: (1, 2)}"]),
            "input_output": json.dumps({"fn_name": "edges", "inputs": [[{"1": 2}]], "outputs": [{"1": [1, 2]}]}),
            "time_limit": None,
        },
        right=["def edges(g): return {1: (1, g[1])}"],
        wrong=["def edges(g): return {2: (1, 2)}", "def edges(g): return {1: (1, g['1'])}"],
    ),
    "livecodebench function": PublishedRow(
        row={
            "question_title": "two",
            "platform": "leetcode",
            "starter_code": f"{TWO_SUM}",
            "public_test_cases": json.dumps([{"input": "[1, 2, 3]\n5", "output": "[1, 2]", "testtype": "functional"}]),
            "private_test_cases": compressed([{"input": "[4, 4]\n8", "output": "[0, 1]", "testtype": "functional"}]),
            "metadata": json.dumps({"func_name": "twoSum"}),
        },
        right=[
            f"{TWO_SUM}return next(p for p in combinations(range(len(nums)), 2) if sum(nums[i] for i in p) == target)"
        ],
        wrong=[f"{TWO_SUM}return [1, 2]", f"{TWO_SUM}return [0, 1]", f"{TWO_SUM}return None"],
    ),
    "livecodebench stdin": PublishedRow(
        row={
            "platform": "atcoder",
            "starter_code": "",
            "public_test_cases": json.dumps([{"input": "3\n", "output": "1.5\n", "testtype": "stdin"}]),
            "private_test_cases": json.dumps([{"input": "2", "output": "1", "testtype": "stdin"}]),
            "metadata": "{}",
        },
        right=[HALF, "n = int(input()); print(f'{n / 2:.7f}')", "n = int(input()); print(n / 2 + 1e-8)"],
        wrong=["print(1.5)", "n = int(input()); print(n / 2 + 1e-3)", "print(int(input()) // 2)"],
    ),
    "codecontests": PublishedRow(
        row={
            "name": "900_A. Greet",
            "public_tests": {"input": ["Ann\nBob\n"], "output": ["Hello Ann\nHello Bob\n"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["Cy\n"], "output": ["Hello Cy\n"]},
            "solutions": {"language": [2, 1, 3], "solution": ["int main() {}", "print 1", GREETS]},
            "time_limit": {"seconds": 2, "nanos": 0},
        },
        right=[GREETS],
        wrong=["print('Hello Ann')\nprint('Hello Bob')", "print('Hello Cy')"],
    ),
    "deepcoder, primeintellect": PublishedRow(
        row={
            "problem": "?",
            "solutions": [f"{HALF}\n"],
            "tests": json.dumps([{"type": "stdin_stdout", "input": "3", "output": "1.5", "fn_name": None}]),
        },
        right=[HALF],
        wrong=["print(3)"],
    ),
    "deepcoder, function": PublishedRow(
        row={
            "problem": "?",
            "tests": json.dumps([{"type": "function_call", "fn_name": "half", "input": [3], "output": [1.5]}]),
        },
        right=["def half(n): return n / 2"],
        wrong=["def half(n): return n", "print(1.5)"],
    ),
    "deepcoder, livecodebench": PublishedRow(
        row={
            "tests": json.dumps(
                [{"input": "3", "output": "[1]", "testtype": "functional", "metadata": {"func_name": "half"}}]
            ),
        },
        right=["class Solution:\n    def half(self, n): return [n // 2]"],
        wrong=["class Solution:\n    def half(self, n): return 1.0"],
    ),
    "verification_info": PublishedRow(
        row={
            "verification_info": {
                "language": "python",
                "test_cases": [{"fn_name": None, "input": "3", "output": "1.5", "type": "stdin_stdout"}],
            }
        },
        right=[HALF],
        wrong=["print(3)"],
    ),
    "reward_model of eurus 2": PublishedRow(
        row={"reward_model": {"ground_truth": json.dumps({"inputs": ["3"], "outputs": ["1.5"]}), "style": "rule"}},
        right=[HALF],
        wrong=["print(3)"],
    ),
    "official_tests": PublishedRow(
        row={"official_tests": [{"input": "3", "output": "1.5"}], "input_format": "?"}, right=[HALF], wrong=["print(3)"]
    ),
    "test_cases of assertions": PublishedRow(
        row={"test_cases": ["assert half(3) == 1.5", "assert half(4) == 2"]},
        right=["half = lambda n: n / 2"],
        wrong=["half = lambda n: n // 2"],
    ),
    "own, several accepted": PublishedRow(
        row={"tests": [{"input": "", "accepted": ["1 2", "2 1"]}, {"call": "f()", "accepted": [[1, 2], [2, 1]]}]},
        right=["print(2, 1)\ndef f(): return 1, 2"],
        wrong=["print(1, 1)\ndef f(): return 1, 2", "print(1, 2)\ndef f(): return 1, 1"],
    ),
}
