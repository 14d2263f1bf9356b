"""Dumps batches whose updates were rejected, for diagnosis.

    <folder>/rank-<n>.parquet   one row per sequence of the replica: tokens, columns, model log-probabilities
    <folder>/rank-<n>.json      the reason, the prompts of each micro-batch, non-finite fields by row

<n> is the output rank of its data-parallel replica. Value models write values instead of log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megarl.batch.sample_table import SampleRef
from megarl.megatron.losses.loss import ModelOutput, token_scores, token_values
from megarl.megatron.modeling.megatron_model import MegatronModel
from megarl.megatron.requests import MiniBatch
from megarl.megatron.training.samples import StepSamples
from megarl.process.atomic_files import atomic_write


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedBatch:
    """Mini-batches whose updates were rejected."""

    reason: str
    """Why they were rejected, as in the error message."""
    batches: Mapping[int, MiniBatch]
    """By their index in the step, from 0."""
    losses: Sequence[Tensor]
    """This rank's share of the loss of each micro-batch; empty if not computed."""


def write_dump(folder: Path, rejected: RejectedBatch, samples: StepSamples, model: MegatronModel) -> None:
    """Write this replica's part of the rejected batch. Collective: runs another forward pass."""
    import pyarrow as pa  # imported here, because no training step needs it
    import pyarrow.parquet as pq

    parts = [
        (number, batch, [batch.samples[i] for i in indices])
        for number, batch in rejected.batches.items()
        for indices in batch.micro_batches
    ]
    trajectories = [[samples.trajectory(ref) for ref in refs] for _, _, refs in parts]
    compute = _values if model.architecture.head == "value" else _logprobs
    outputs = model.forward_sequences(trajectories, compute, score_all=True)
    if not model.is_last_stage or model.groups.tp.rank() or model.groups.cp.rank():
        return
    column_name = f"model_{'values' if model.architecture.head == 'value' else 'logprobs'}"
    rows: list[dict[str, object]] = []
    micro_batches: list[dict[str, object]] = []
    for (number, batch, refs), batch_outputs in zip(parts, outputs, strict=True):
        position = {"mini_batch": number, "micro_batch": len(micro_batches)}
        for ref, output_1n in zip(refs, batch_outputs, strict=True):
            # the output at position i belongs to token i + 1
            rows.append(position | _row(batch, ref, samples) | {column_name: [0.0, *output_1n[0, :-1].tolist()]})
        prompt_ids = [samples.trajectory(ref).prompt_id for ref in refs]
        is_finite = bool(rejected.losses[len(micro_batches)].isfinite()) if rejected.losses else None
        micro_batches.append(position | {"loss_is_finite": is_finite, "prompt_ids": prompt_ids})
    summary = {
        "what": rejected.reason,
        "rank": dist.get_rank(),
        "not_finite": list(_not_finite(rows)),
        "micro_batches": micro_batches,
    }
    name = f"rank-{dist.get_rank()}"
    with atomic_write(folder / f"{name}.parquet") as path:
        pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")
    with atomic_write(folder / f"{name}.json") as path:
        path.write_text(json.dumps(summary, indent=1) + "\n")


def _row(batch: MiniBatch, ref: SampleRef, samples: StepSamples) -> dict[str, object]:
    trajectory = samples.trajectory(ref)
    columns = {name: samples.column(name, ref) for name in samples.column_names(batch)}
    return {
        "prompt_id": trajectory.prompt_id,
        "group_id": trajectory.group_id,
        "rewards": json.dumps(dict(trajectory.rewards)),
        "finish_reason": trajectory.finish_reason,
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": trajectory.loss_mask.tolist(),
        "policy_versions": trajectory.policy_versions.tolist(),
        "logprobs": trajectory.logprobs.tolist(),
        **{name: v.tolist() if isinstance(v, np.ndarray) else float(v) for name, v in columns.items()},
    }


def _not_finite(rows: Sequence[Mapping[str, object]]) -> Iterator[dict[str, object]]:
    """Yield the rows that have non-finite fields, with the names of these fields."""
    for number, row in enumerate(rows):
        numbers = {name: v for name, v in row.items() if isinstance(v, float | list)}
        fields = [name for name, v in numbers.items() if not np.isfinite(v).all()]
        if fields:
            yield {"row": number, "prompt_id": row["prompt_id"], "fields": fields}


def _logprobs(output: ModelOutput) -> Tensor:
    return token_scores(output).logprobs_T[None]


def _values(output: ModelOutput) -> Tensor:
    return token_values(output)[None]
