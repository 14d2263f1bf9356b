"""The example of an agent outside the package: `megarl train` with a masked observation in each episode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from megarl.data.tokenizer import load_tokenizer
from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import list_steps

EXAMPLE = Path(__file__).parents[2] / "examples/custom-agent"
TOKENS_PER_TURN = 6
HINT = "Once more: "


def test_two_turns_are_sampled_and_trained_on_without_the_text_between_them(
    world: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE), prepend=":")
    changes = {
        "run_dir": tmp_path / "run",
        "model.path": world / "model",
        "data.path": world / "data/train.jsonl",
        "data.eval_path": "null",
        "data.overlong_prompts": "drop",
        "algorithm.group_size": 2,
        "algorithm.prompts_per_step": 4,
        "trainer.steps": 2,
        "trainer.optimizer.warmup_steps": 1,
        "rollout.max_new_tokens": 90,
        "rollout.agent.kwargs.tokens_per_turn": TOKENS_PER_TURN,
        "rollout.agent.kwargs.hint": f"'{HINT}'",
        "reward.terms": "{one: {type: format, pattern: '[a-m]'}}",
    }
    command = launch("train", EXAMPLE / "agent.yaml", "--set", *(f"{key}={value}" for key, value in changes.items()))
    assert command.wait(120) == 0, command.stdout + command.stderr

    steps = list_steps(tmp_path / "run")
    assert [row["policy_version/min"] for row in steps] == [0, 1]
    assert max(row["grad_norm"] for row in steps) > 0
    # the trainer computes the log-probabilities of the second turn after the same observation as the engine
    assert max(row["train_infer_mismatch/logprob_abs_max"] for row in steps) <= 1e-4

    tokenizer = load_tokenizer(world / "model")
    (first, _) = sorted((tmp_path / "run/rollouts").iterdir())
    rows = pq.read_table(first).to_pylist()
    assert len(rows) == 8
    for row in rows:
        mask = np.array(row["loss_mask"])
        starts = np.flatnonzero(np.diff(mask.astype(int), prepend=0) == 1)
        ends = np.flatnonzero(np.diff(mask.astype(int), append=0) == -1) + 1
        assert len(starts) == len(ends) == 2
        assert all(0 < end - start <= TOKENS_PER_TURN for start, end in zip(starts, ends, strict=True))
        assert tokenizer.decode(row["token_ids"][ends[0] : starts[1]]) == f"\n{HINT}{row['prompt']}"
        assert np.all(np.array(row["logprobs"])[~mask] == 0)
        assert ends[1] == row["num_tokens"]
