"""The rollout log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from megarl.batch.trajectory import Trajectory
from megarl.tracking.rollout_log import write_rollouts


def decode(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def trajectory(prompt: str, spans: list[tuple[str, int]], **fields: object) -> Trajectory:
    """Return a trajectory; `spans`: texts after the prompt with their policy versions (-1: tool output)."""
    text = prompt + "".join(t for t, _ in spans)
    versions = [-1] * len(prompt) + [v for t, v in spans for _ in t]
    return Trajectory(
        prompt_id="train.jsonl:3",
        token_ids=np.array([ord(c) for c in text], dtype=np.int32),
        loss_mask=np.array(versions) >= 0,
        logprobs=np.array([0.0 if v < 0 else -0.5 for v in versions], dtype=np.float32),
        policy_versions=np.array(versions, dtype=np.int32),
        **fields,  # type: ignore[arg-type]
    )


def test_rows_hold_the_trajectories(tmp_path: Path) -> None:
    rows = [
        trajectory(
            "Q?", [("ab", 4), ("[tool]", -1), ("c", 6)], group_id=0, rewards={"acc": 1.0, "fmt": 0.5}, reward=1.5
        ),
        trajectory("Why?", [("no", 5)], group_id=1, finish_reason="length"),
        trajectory("Mute", [], group_id=2),
        trajectory("Odd", [("!", 5)], group_id=2, rewards={"acc": 1.0}, reward_errors={"fmt": "took too long"}),
    ]
    path = tmp_path / "rollouts" / "step_7.parquet"
    write_rollouts(path, rows, [0.7, -0.7, np.float32(np.nan), None], step=7, decode=decode)
    first, second, third, dropped = pq.read_table(path).to_pylist()
    assert first == {
        "step": 7,
        "prompt_id": "train.jsonl:3",
        "group_id": 0,
        "prompt": "Q?",
        "response": "ab[tool]c",
        "reward": 1.5,
        "rewards": [("acc", 1.0), ("fmt", 0.5)],
        "reward_errors": [],
        "advantage": pytest.approx(0.7),
        "policy_version_min": 4,
        "policy_version_max": 6,
        "num_tokens": 11,
        "finish_reason": "stop",
        "segment": 0,
        "token_ids": [ord(c) for c in "Q?ab[tool]c"],
        "loss_mask": [False] * 2 + [True] * 2 + [False] * 6 + [True],
        "logprobs": [0.0] * 2 + [-0.5] * 2 + [0.0] * 6 + [-0.5],
    }
    assert (second["group_id"], second["finish_reason"], second["rewards"]) == (1, "length", [])
    assert (third["prompt"], third["response"], third["policy_version_min"]) == ("Mute", "", None)
    assert (dropped["reward"], dropped["advantage"], dropped["rewards"]) == (None, None, [("acc", 1.0)])
    assert dropped["reward_errors"] == [("fmt", "took too long")]


def test_file_is_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rollouts(path, [trajectory("Q", [("a", 0)], group_id=0)], [1.0], step=1, decode=decode)
    before = path.read_bytes()

    def fails(token_ids: list[int]) -> str:
        raise KeyError

    with pytest.raises(KeyError):
        write_rollouts(path, [trajectory("Q", [("b", 0)], group_id=0)], [1.0], step=2, decode=fails)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]
    with pytest.raises(AssertionError, match=r"1 trajectories, 2 advantages"):
        write_rollouts(path, [trajectory("Q", [], group_id=0)], [1.0, 2.0], step=2, decode=decode)


def test_no_trajectories_give_an_empty_table(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "a.parquet", [], [], step=1, decode=decode)
    assert pq.read_table(tmp_path / "a.parquet").num_rows == 0
