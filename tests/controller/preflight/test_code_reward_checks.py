"""Rows in the format in which MBPP is published, good and damaged, before a run with a term of type `code`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.cli.main import main
from megarl.config import RunConfig
from megarl.controller.preflight import data_checks
from megarl.controller.preflight.data_checks import NUM_SOLUTIONS, find_test_case_problems, report_code_rows
from megarl.controller.preflight.run_checks import find_reward_problems
from megarl.errors import ConfigError
from megarl.run.remote.build import read_prompts
from megarl.sandbox import tiers
from tests.cli.tiny_run import ROWS, write_config, write_rows, write_tiny_run
from tests.config.runs import has_parts
from tests.errors import expect_error
from tests.run.finished_groups import run_config
from tests.sandbox.local_tiers import PATIENT, patience


def mbpp_row(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "text": "1 + 1 =",
        "code": f"def add_{number}(x):\r\n  return math.floor(x) + {number}",
        "task_id": number,
        "test_setup_code": "import math",
        "test_list": [f"assert add_{number}(1) == {number + 1}", f"assert add_{number}(0.5) == {number}"],
        "challenge_test_list": [],
    } | changes


SANDBOX = {"allow_unsafe": True, **PATIENT}


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    with patience():
        yield


def make_config(folder: Path, rows: list[dict[str, Any]], held_out: list[dict[str, Any]] | None = None, **term: Any):
    sandbox = SANDBOX | term.pop("sandbox", {})
    data = {"path": str(write_rows(folder / "mbpp.jsonl", rows)), "fields": {"prompt": "text"}}
    if held_out is not None:
        data["eval_path"] = str(write_rows(folder / "held-out.jsonl", held_out))
    reward = {"terms": {"tests": {"type": "code", "sandbox": sandbox, **term}}}
    return run_config({}, run_dir=str(folder / "run"), data=data, reward=reward)


def with_data(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def test_rows_as_published_have_no_problems(tmp_path):
    rows = [mbpp_row(i) for i in range(3)]
    config = make_config(tmp_path, rows, rows)
    assert [*find_test_case_problems(config)] == []
    assert [line for report in report_code_rows(config) for line in report.lines()] == [
        f"data.{key}: reward.terms.tests (code): 3 of 3 {what}"
        for key in ("path", "eval_path")
        for what in ("rows can be graded", "reference solutions that were tried score 1")
    ]
    # sanitized rows have a list of imports
    rows = [mbpp_row(i, test_imports=["import math", "from math import floor"]) for i in range(2)]
    for row in rows:
        del row["test_setup_code"]
    config = make_config(tmp_path, rows)
    assert [*find_test_case_problems(config)] == []
    assert [len(report.failures) for report in report_code_rows(config)] == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_list": None}, "needs test cases in 'test_list', got 'None'"),
        ({"test_list": []}, "needs test cases in 'test_list', got '[]'"),
        ({"test_list": ["assert f(1) != 2"]}, "test_list[0] needs an assertion that compares a call of the program"),
        (
            {"test_list": ["assert f(1) == g(1)"]},
            "expected values need to be evaluated without the program: fails: Name",
        ),
        ({"test_list": ["assert f(1) == 1", {"input": 1}]}, "test_list[0] needs {input, output} or {call, expected}"),
        ({"test_list": [{"call": "f(", "expected": 1}]}, "test_list[0] needs an expression in 'call', got 'f('"),
        ({"test_setup_code": 7}, "needs source or a list of its lines in 'test_setup_code', got '7'"),
    ],
)
def test_damaged_rows_are_named_with_file_and_line(tmp_path, changes, message):
    config = make_config(tmp_path, [mbpp_row(0)], [mbpp_row(1), mbpp_row(2, **changes), mbpp_row(3)])
    (problem,) = find_test_case_problems(config)
    assert problem.startswith(
        "data.eval_path: reward.terms.tests (code) needs test cases that it can use in each row, 1 of 3 rows have "
        f"others (ungradable_rows: drop leaves them out): {tmp_path}/held-out.jsonl:2: {message}"
    )


def test_a_message_has_a_few_examples_and_a_count(tmp_path):
    rows = [mbpp_row(i, test_list=[]) if i % 2 else mbpp_row(i) for i in range(80)]
    (problem,) = find_test_case_problems(make_config(tmp_path, rows))
    assert "40 of 80 rows have others" in problem
    assert problem.count("mbpp.jsonl:") == 20
    assert problem.endswith("; and 20 more")


def test_only_rows_that_are_scored_are_examined(tmp_path):
    config = make_config(tmp_path, [mbpp_row(0)], [mbpp_row(1), mbpp_row(2, test_list=[])])
    assert [*find_test_case_problems(with_data(config, eval_size=1))] == []

    sources = {
        "code": {"path": str(tmp_path / "mbpp.jsonl"), "ratio": 0.5, "fields": {"prompt": "text"}},
        "sums": {"path": str(write_rows(tmp_path / "sums.jsonl", ROWS)), "ratio": 0.5, "reward_terms": ["right"]},
    }
    terms = {"tests": {"type": "code", "sandbox": SANDBOX}, "right": {"type": "numeric"}}
    tree = config.model_dump() | {"data": {"sources": sources}, "reward": {"terms": terms}}
    mixed = RunConfig.model_validate(tree)
    assert [*find_test_case_problems(mixed)] == []
    assert [report.key for report in report_code_rows(mixed)] == ["data.sources.code.path"]


def test_solutions_that_do_not_score_1_are_reported(tmp_path):
    rows = [mbpp_row(i) for i in range(5)]
    rows[1]["code"] = "def add_1(x): return x + 1"
    rows[3]["code"] = "import no_such_module"
    (report,) = report_code_rows(make_config(tmp_path, rows))
    assert report.lines()[1] == (
        "data.path: reward.terms.tests (code): 2 of 5 reference solutions that were tried do not score "
        f"1: {tmp_path}/mbpp.jsonl:2: test 1: add_1(0.5) gives 1.5, needs 1; {tmp_path}/mbpp.jsonl:4: "
        "test 0: add_3(1) fails: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_solutions_that_all_fail_are_a_problem(tmp_path):
    rows = [mbpp_row(i, code="while True: pass") for i in range(2)]
    config = make_config(tmp_path, rows, sandbox={"wall_seconds": 0.2})
    with expect_error(ConfigError, "data.path", "2", "1", "add_0(1)"):
        report_code_rows(config)


def test_a_sample_is_spread_over_the_file(tmp_path, monkeypatch):
    tried: list[int] = []
    monkeypatch.setattr(data_checks, "find_failure", lambda tests, solution, _: tried.append(int(solution)))
    for num_rows in (1, NUM_SOLUTIONS, NUM_SOLUTIONS + 1, 100):
        tried.clear()
        (report,) = report_code_rows(make_config(tmp_path, [mbpp_row(i, code=str(i)) for i in range(num_rows)]))
        assert report.num_tried == len(tried) == len(set(tried))
        assert min(num_rows, NUM_SOLUTIONS / 2) <= len(tried) <= NUM_SOLUTIONS
        assert max(tried) >= num_rows - num_rows / len(tried) - 1
        assert tried[0] == 0


def test_rows_without_solutions_are_not_tried(tmp_path):
    row = mbpp_row(0)
    del row["code"]
    for rows, field in (([row], "auto"), ([mbpp_row(0, code="1 / 0")], None)):
        (report,) = report_code_rows(make_config(tmp_path, rows, solution_field=field))
        assert report.lines() == ["data.path: reward.terms.tests (code): 1 of 1 rows can be graded"]


def test_rows_that_cannot_be_graded_are_dropped_by_an_option(tmp_path, caplog):
    rows = [mbpp_row(i, **({"test_list": ["assert f(1) != 2"]} if i % 3 == 1 else {})) for i in range(6)]
    config = make_config(tmp_path, rows, rows[:2], ungradable_rows="drop")
    assert [*find_test_case_problems(config)] == []
    (training, _) = report_code_rows(config)
    reason = "test_list[0] needs an assertion that compares a call of the program with an expected value"
    assert training.lines()[0].startswith(
        "data.path: reward.terms.tests (code): 4 of 6 rows can be graded, 2 are dropped: "
        f"{tmp_path}/mbpp.jsonl:2: {reason}"
    )
    model = config.model.model_copy(update={"path": write_tiny_run(tmp_path)["model"]["path"]})
    rollout = config.rollout.model_copy(update={"max_new_tokens": 32})
    prompts = read_prompts(config.model_copy(update={"model": model, "rollout": rollout}), tmp_path)
    assert [prompt.row["task_id"] for prompt in prompts.training] == [0, 2, 3, 5]
    assert [prompt.row["task_id"] for prompt in prompts.held_out] == [0]
    assert f"{tmp_path}/mbpp.jsonl: dropped 2 rows that cannot be graded" in caplog.text

    (problem, _) = find_test_case_problems(make_config(tmp_path, rows[1:2], rows[1:2], ungradable_rows="drop"))
    assert "1 of 1 rows have others" in problem


def test_reads_parquet_and_programs_that_print(tmp_path):
    row = {"text": "1", "code": "print(sum(map(int, input().split())))", "tests": [{"input": "3 4", "output": "7"}]}
    config = make_config(tmp_path, [], tests_field="tests")
    pq.write_table(pa.Table.from_pylist([row, row | {"code": "print(8)"}]), tmp_path / "rows.parquet")
    config = with_data(config, path=str(tmp_path / "rows.parquet"))
    assert [*find_test_case_problems(config)] == []
    (report,) = report_code_rows(config)
    assert report.failures == [f"{tmp_path}/rows.parquet:2: test 0: of the input gives '8\\n', needs '7'"]


def test_a_tier_that_this_machine_lacks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "find_tier_problem", {"bubblewrap": "bwrap is not installed", "launcher": None}.get)
    sandbox = {"tier": "bubblewrap", "allow_unsafe": False}
    (problem,) = find_reward_problems(make_config(tmp_path, [mbpp_row(0)], sandbox=sandbox))
    start = "reward.terms.tests.sandbox needs a sandbox that works on this machine"
    assert has_parts(problem, f"{start} ... got none (bubblewrap: bwrap is not installed)")


def test_check_reports_rows_and_solutions(tmp_path, capsys):
    tree = write_tiny_run(tmp_path)
    rows = [{"prompt": row["prompt"], **mbpp_row(i)} for i, row in enumerate(ROWS[:3])]
    tree["data"] = {"path": str(write_rows(tmp_path / "mbpp.jsonl", rows))}
    tree["reward"] = {"terms": {"tests": {"type": "code", "sandbox": SANDBOX}}}
    recipe = str(write_config(tmp_path / "run.yaml", tree))
    assert main(["check", recipe]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "# data.path: reward.terms.tests (code): 3 of 3 rows can be graded" in lines
    assert "# data.path: reward.terms.tests (code): 3 of 3 reference solutions that were tried score 1" in lines

    rows[1]["test_list"] = ["assert add_1(1)", "add_1(2)"]
    (tmp_path / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["check", recipe]) == 2
    assert f"drop leaves them out): {tmp_path}/mbpp.jsonl:2: test_list[1] needs an" in capsys.readouterr().err
