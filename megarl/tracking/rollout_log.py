"""Writes all completions of a step to a Parquet file, for inspection and offline checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from megarl.batch.trajectory import Trajectory
from megarl.cluster.process.atomic_files import atomic_write
from megarl.text import map_text, replace_surrogates

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("prompt_id", pa.string()),
        ("group_id", pa.int64()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("reward_errors", pa.map_(pa.string(), pa.string())),
        ("advantage", pa.float64()),
        ("policy_version_min", pa.int32()),
        ("policy_version_max", pa.int32()),
        ("num_tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("segment", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
    ]
)
"""Columns of the file, one row per trajectory. Rows with `segment` above 0 continue the episode of the row before.

`response` is everything after the prompt, including tool output. `rewards` maps a term to its value, and
`<term>/<name>` to its further values; `reward_errors` maps a term that failed to its message: such a completion was
dropped, and its `reward` and `advantage` are null. Policy versions are those of the sampled tokens (null
if there are none). Surrogates in texts are U+FFFD. The last three columns have one entry per token, prompt first.
"""


def write_rollouts(
    path: str | Path,
    trajectories: Sequence[Trajectory],
    advantages_N: Sequence[float | None] | NDArray[np.floating],
    *,
    step: int,
    decode: Callable[[list[int]], str],
) -> None:
    """Write one row per trajectory to `path`, atomically; creates its folder.

    Args:
        path: the Parquet file.
        trajectories: N of them.
        advantages_N: [N], one advantage per trajectory; None for one that was not trained on.
        step: the step that trained on them.
        decode: token ids -> text; should keep special tokens, to show what the policy saw.
    """
    assert len(trajectories) == len(advantages_N), f"{len(trajectories)} trajectories, {len(advantages_N)} advantages"
    columns = {
        "step": [step] * len(trajectories),
        "prompt_id": [t.prompt_id for t in trajectories],
        "group_id": [t.group_id for t in trajectories],
        "prompt": [decode(t.token_ids[: t.prompt_length].tolist()) for t in trajectories],
        "response": [decode(t.token_ids[t.prompt_length :].tolist()) for t in trajectories],
        "reward": [None if t.reward_errors else t.reward for t in trajectories],
        "rewards": [list(t.rewards.items()) for t in trajectories],
        "reward_errors": [list(t.reward_errors.items()) for t in trajectories],
        "advantage": [None if a is None else float(a) for a in advantages_N],
        "policy_version_min": [_version(t, np.min) for t in trajectories],
        "policy_version_max": [_version(t, np.max) for t in trajectories],
        "num_tokens": [t.num_tokens for t in trajectories],
        "finish_reason": [t.finish_reason for t in trajectories],
        "segment": [t.segment for t in trajectories],
        "token_ids": [t.token_ids for t in trajectories],
        "loss_mask": [t.loss_mask for t in trajectories],
        "logprobs": [t.logprobs for t in trajectories],
    }
    table = pa.table(map_text(columns, replace_surrogates), schema=SCHEMA)
    with atomic_write(Path(path)) as draft:
        pq.write_table(table, draft, compression="zstd")


def _version(trajectory: Trajectory, pick: Callable[[NDArray[np.int32]], np.int32]) -> int | None:
    versions = trajectory.policy_versions[trajectory.loss_mask]
    return int(pick(versions)) if len(versions) else None
