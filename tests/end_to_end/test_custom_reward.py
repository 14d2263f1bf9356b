"""The example of a reward outside the package: `megarl train` with a reward per group, and dropped completions."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import list_steps

EXAMPLE = Path(__file__).parents[2] / "examples/custom-reward"

FLAKY = """
from pathlib import Path
from reward import ShortestAnswer

class Flaky(ShortestAnswer):
    def __init__(self, log, **kwargs):
        super().__init__(**kwargs)
        self.log = Path(log)

    def score(self, trajectories, texts, row):
        results = super().score(trajectories, texts, row)
        return [result | {"reward": len(text)} if i else None for i, (result, text) in enumerate(zip(results, texts))]

    def close(self):
        self.log.write_text("closed")
"""


def test_failed_completions_are_neither_trained_on_nor_averaged(
    world: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{EXAMPLE}", prepend=":")
    changes = {
        "run_dir": tmp_path / "run",
        "model.path": world / "model",
        "data.path": world / "data/train.jsonl",
        "data.eval_path": "null",
        "algorithm.group_size": 3,
        "algorithm.prompts_per_step": 4,
        "trainer.steps": 2,
        "trainer.optimizer.warmup_steps": 1,
        "reward.terms.shortest.path": "flaky:Flaky",
        "reward.terms.shortest.kwargs.log": tmp_path / "closed.txt",
    }
    command = launch("train", EXAMPLE / "demo.yaml", "--set", *(f"{key}={value}" for key, value in changes.items()))
    assert command.wait(240) == 0, command.stdout + command.stderr
    assert (tmp_path / "closed.txt").read_text() == "closed"

    steps = list_steps(tmp_path / "run")
    assert [row["policy_version/min"] for row in steps] == [0, 1]
    assert [row["reward/dropped"] for row in steps] == [row["reward/shortest/dropped"] for row in steps] == [4, 4]
    assert all(row["grad_norm"] > 0 for row in steps)
    logs = sorted((tmp_path / "run/rollouts").iterdir())
    for row, log in zip(steps, logs, strict=True):
        rollouts = pq.read_table(log).to_pylist()
        assert len(rollouts) == 12
        dropped, kept = (
            [each for each in rollouts if bool(each["reward_errors"]) == failed] for failed in (True, False)
        )
        assert [(each["reward"], each["advantage"]) for each in dropped] == [(None, None)] * 4
        assert "returned NoneType None, not a number, on train.jsonl:" in dict(dropped[0]["reward_errors"])["shortest"]
        lengths = [dict(each["rewards"])["shortest/characters"] for each in kept]
        assert row["reward/shortest/characters"] == pytest.approx(sum(lengths) / 8)
        assert row["reward/mean"] == row["reward/shortest"] == pytest.approx(sum(lengths) / 8)
        assert [each["reward"] for each in kept] == lengths
        for group in range(4):
            members = [each for each in kept if each["group_id"] == group]
            assert sum(each["advantage"] for each in members) == pytest.approx(0, abs=1e-5)


def test_the_example_prefers_the_shortest_correct_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    from reward import ShortestAnswer

    texts = ["8+3=11 #### 11", "#### 11", "#### 12"]
    scored = ShortestAnswer(bonus=0.5).score([], texts, {"answer": "11"})
    assert [result["reward"] for result in scored] == [1.0, 1.5, 0.0]
    assert [result["characters"] for result in scored] == [14, 7, 7]
