"""The term `code` on rows in the format in which MBPP is published.

Completions of any kind have a value, and no input holds an answer.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from megarl.batch.trajectory import Prompt
from megarl.data.rows import read_rows
from megarl.errors import ConfigError, SandboxError
from megarl.reward.reward_scorer import RewardScorer
from megarl.reward.test_cases import find_program
from megarl.sandbox import tiers
from megarl.sandbox.tiers import LocalSandbox
from tests.errors import expect_error
from tests.reward.conftest import make_scorer, make_trajectory
from tests.sandbox.corpus.forgeries import FORGERIES
from tests.sandbox.local_tiers import PATIENT, patience

MBPP_ROW = {
    "text": "Write a function to find the longest common prefix of a list of strings.",
    "code": "import os\ndef common_prefix(words):\n    return os.path.commonprefix(words)",
    "task_id": 2001,
    "test_setup_code": "EMPTY = []",
    "test_list": [
        "assert common_prefix(['flow', 'flower']) == 'flow'",
        'assert common_prefix(["a", "b"]) == ""',
        "assert not common_prefix(EMPTY + ['', 'x'])",
    ],
    "challenge_test_list": [],
}

RIGHT = "Here it is:\n```python\nfrom os.path import commonprefix as common_prefix\n```\nDone."
HALF = "```\ndef common_prefix(words):\n    return 'flow'\n```"


@pytest.fixture
def prompt(tmp_path) -> Prompt:
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(MBPP_ROW) + "\n")
    (row,) = read_rows(str(tmp_path / "mbpp.jsonl"))
    return with_row(row.fields)


def with_row(row) -> Prompt:
    return Prompt(prompt_id="mbpp.jsonl:1", text="Q?", token_ids=(81,), row=row)


@pytest.fixture(scope="module", autouse=True)
def _patience():
    with patience():
        yield


def code_scorer(*, sandbox=None, **fields) -> RewardScorer:
    sandbox = {**PATIENT, "allow_unsafe": True} | (sandbox or {})
    return make_scorer(tests={"type": "code", "sandbox": sandbox, **fields})


def score(scorer: RewardScorer, prompt: Prompt, *completions: str):
    group = asyncio.run(scorer.score([make_trajectory(text) for text in completions], prompt))
    asyncio.run(scorer.close())
    return group.trajectories


def test_runs_the_tests_of_a_row(prompt):
    found = score(code_scorer(), prompt, RIGHT, HALF, MBPP_ROW["code"], "no program")
    assert [t.rewards["tests"] for t in found] == [1.0, 0.0, 1.0, 0.0]
    assert [round(t.rewards["tests/passed"], 3) for t in found] == [1.0, 0.333, 1.0, 0.0]
    assert [t.rewards["tests"] for t in score(code_scorer(score="share"), prompt, RIGHT, HALF)] == [1.0, 1 / 3]
    assert [t.rewards["tests"] for t in score(code_scorer(require_block=True), prompt, MBPP_ROW["code"])] == [0.0]
    endless = score(code_scorer(sandbox={"wall_seconds": 0.1}), prompt, "```python\nwhile True: pass\n```")
    assert [t.rewards["tests"] for t in endless] == [0.0]


def test_forged_results_score_0(prompt):
    texts = [text.replace("answer(x)", "common_prefix(words)").replace("(x)", "(words)") for text in FORGERIES.values()]
    two = with_row({**prompt.row, "test_list": MBPP_ROW["test_list"][:2]})
    assert [t.rewards["tests"] for t in score(code_scorer(), two, *texts)] == [0.0] * len(texts)


BAD_PROGRAMS = {
    "": "no program",
    "x = '\x00'": "null byte",
    "print('x' * 10**7)\nfrom os.path import commonprefix as common_prefix": "huge output",
    "import os\nos.closerange(0, 64)\nfrom os.path import commonprefix as common_prefix": "closed files",
    "import os\ndef common_prefix(words):\n    os.write(3, b'\\xff')\n    return 'flow'": "no text",
    "import os\ndef common_prefix(words):\n    os.write(3, b\"'flow'\")\n    return 'flow'": "two values",
    "def common_prefix(words):\n    return 'x' * 10**7": "huge value",
    "import sys\nsys.stdin.close()\nsys.stdout.close()\nsys.stderr = None": "no streams",
}


def test_bad_programs_score_0_and_are_no_failures(prompt):
    found = score(code_scorer(), prompt, *(f"```python\n{source}\n```" for source in BAD_PROGRAMS))
    for name, trajectory in zip(BAD_PROGRAMS.values(), found, strict=True):
        assert (trajectory.rewards["tests"], trajectory.reward_errors) == (0.0, {}), name


def test_programs_are_scored_by_what_they_print():
    tests = [{"input": "3 4\n", "output": "7\n"}, {"input": "1 1", "output": "2"}]
    both, first = (with_row({"tests": tests[:count]}) for count in (2, 1))
    adds = "import sys\nprint(sum(map(int, input().split())))\n"
    found = score(code_scorer(tests_field="tests"), both, adds, "print(7)")
    assert [t.rewards["tests"] for t in found] == [1.0, 0.0]
    closes = f"{adds}sys.stdin.close()\nsys.stdout.close()"
    writes = [f"import os\nos.write(1, b'7{end}')" for end in ("\\xff", "\\0")]
    found = score(code_scorer(tests_field="tests"), first, closes, *writes, "print(7, end='\\r\\n \\n')")
    assert [t.rewards["tests"] for t in found] == [1.0, 0.0, 0.0, 1.0]


def test_a_lost_sandbox_is_a_failure_and_no_reward(prompt, monkeypatch):
    calls = []

    def run(self, program, **_):
        calls.append(program)
        raise SandboxError("cannot start a sandbox of tier launcher: no memory")

    monkeypatch.setattr(LocalSandbox, "run", run)
    (found,) = score(code_scorer(), prompt, RIGHT)
    assert "cannot start a sandbox" in found.reward_errors["tests"]
    assert "tests" not in found.rewards
    assert len(calls) == 2  # once more
    assert not any("== 'flow'" in str(program) for program in calls)


def test_rows_without_usable_tests_are_failures_and_machines_without_sandboxes_are_refused(prompt, monkeypatch):
    (found,) = score(code_scorer(), with_row({**prompt.row, "test_list": ["assert f(1) != 2"]}), RIGHT)
    assert "mbpp.jsonl:1: test_list[0] needs an assertion that compares a call" in found.reward_errors["tests"]
    monkeypatch.setattr(tiers, "find_tier_problem", {"bubblewrap": "none", "launcher": "none", "runsc": "none"}.get)
    with expect_error(ConfigError, "reward.terms.tests.sandbox"):
        code_scorer(sandbox={"allow_unsafe": False})


def test_finds_the_last_block():
    assert find_program("```py\na\n```\n```Python\nb\n```", require_block=False) == "b\n"
    assert find_program("a = 1", require_block=False) == "a = 1"
    assert find_program("a = 1", require_block=True) is None
