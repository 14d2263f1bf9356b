"""One `megarl train` with the examples of an algorithm, an agent and a group reward outside the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from megarl.data.tokenizer import load_tokenizer
from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import list_steps

EXAMPLES = Path(__file__).parents[2] / "examples"
ALGORITHM, AGENT, REWARD = (EXAMPLES / f"custom-{name}" for name in ("algorithm", "agent", "reward"))
TOKENS_PER_TURN = 6
HINT = "Once more: "

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
"""A reward of the number of characters, which fails on the first completion of each group."""


def test_algorithm_agent_and_reward_of_the_examples_train_together(
    world: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, (tmp_path, ALGORITHM, AGENT, REWARD))), prepend=":")
    changes = {
        "run_dir": tmp_path / "run",
        "model.path": world / "model",
        "data.path": world / "data/train.jsonl",
        "data.eval_path": "null",
        "data.overlong_prompts": "drop",
        "algorithm.group_size": 3,
        "algorithm.prompts_per_step": 4,
        "trainer.steps": 2,
        "trainer.optimizer.warmup_steps": 1,
        "rollout.max_new_tokens": 90,
        "rollout.agent.path": "agent:run",
        "rollout.agent.kwargs.tokens_per_turn": TOKENS_PER_TURN,
        "rollout.agent.kwargs.hint": f"'{HINT}'",
        "reward.max_failed_share": 1,
        "reward.terms": "{shortest: {type: python, path: flaky:Flaky, per: group, on_error: drop}}",
        "reward.terms.shortest.kwargs": f"{{bonus: 0.2, log: {tmp_path / 'closed.txt'}}}",
        "placement.slots_per_node": 1,
    }
    overrides = (f"{key}={value}" for key, value in changes.items())
    command = launch("train", ALGORITHM / "demo.yaml", "--set", *overrides)
    assert command.wait() == 0, command.stdout + command.stderr
    assert (tmp_path / "closed.txt").read_text() == "closed"

    steps = list_steps(tmp_path / "run")
    assert [row["policy_version/min"] for row in steps] == [0, 1]
    assert all(row["grad_norm"] > 0 for row in steps)
    # the trainer computes the log-probabilities of the second turn after the same observation as the engine
    assert max(row["train_infer_mismatch/logprob_abs_max"] for row in steps) <= 1e-4
    tokenizer = load_tokenizer(world / "model")
    for row, log in zip(steps, sorted((tmp_path / "run/rollouts").iterdir()), strict=True):
        rollouts = pq.read_table(log).to_pylist()
        assert len(rollouts) == 12
        for rollout in rollouts:
            check_turns(rollout, tokenizer)
        check_dropped(row, rollouts)


def check_turns(rollout: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that both turns were sampled, and that the text between them is not trained on."""
    mask = np.array(rollout["loss_mask"])
    starts = np.flatnonzero(np.diff(mask.astype(int), prepend=0) == 1)
    ends = np.flatnonzero(np.diff(mask.astype(int), append=0) == -1) + 1
    assert len(starts) == len(ends) == 2
    assert all(0 < end - start <= TOKENS_PER_TURN for start, end in zip(starts, ends, strict=True))
    assert tokenizer.decode(rollout["token_ids"][ends[0] : starts[1]]) == f"\n{HINT}{rollout['prompt']}"
    assert np.all(np.array(rollout["logprobs"])[~mask] == 0)
    assert ends[1] == rollout["num_tokens"]


def check_dropped(row: dict[str, Any], rollouts: list[dict[str, Any]]) -> None:
    """Check that completions whose reward failed are neither trained on nor averaged."""
    assert (row["reward/dropped"], row["reward/shortest/failed"]) == (4, 4)
    dropped, kept = ([each for each in rollouts if bool(each["reward_errors"]) == failed] for failed in (True, False))
    assert [(each["reward"], each["advantage"]) for each in dropped] == [(None, None)] * 4
    assert "returned NoneType None, not a number, on train.jsonl:" in dict(dropped[0]["reward_errors"])["shortest"]
    lengths = [dict(each["rewards"])["shortest/characters"] for each in kept]
    assert row["reward/shortest/characters"] == pytest.approx(sum(lengths) / 8)
    assert row["reward/mean"] == row["reward/shortest"] == pytest.approx(sum(lengths) / 8)
    assert [each["reward"] for each in kept] == lengths
    for group in range(4):
        advantages = [each["advantage"] for each in kept if each["group_id"] == group]
        assert len(advantages) == 2
        assert sum(advantages) == pytest.approx(0, abs=1e-5)  # the median of two rewards is their mean


def test_the_example_prefers_the_shortest_correct_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REWARD)
    from reward import ShortestAnswer

    texts = ["8+3=11 #### 11", "#### 11", "#### 12"]
    scored = ShortestAnswer(bonus=0.5).score([], texts, {"answer": "11"})
    assert [result["reward"] for result in scored] == [1.0, 1.5, 0.0]
    assert [result["characters"] for result in scored] == [14, 7, 7]
