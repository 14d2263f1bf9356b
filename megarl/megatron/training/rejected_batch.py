"""Writes down a batch that an update was refused for, so that one can see why.

    <folder>/rank-<n>.parquet   a row for each sequence of the replica: tokens, columns, what the model says of them
    <folder>/rank-<n>.json      what was wrong, each micro-batch's prompts, which fields of which rows are not finite

<n> is the rank that answers for its data-parallel replica.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.modeling.logprobs import token_logprobs
from megarl.megatron.modeling.megatron_model import LocalPack, ModelRank
from megarl.megatron.requests import MiniBatch, SampleRef
from megarl.megatron.training.samples import Samples
from megarl.process.atomic_files import replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Mini-batches that were not learnt from."""

    text: str
    """What was wrong."""
    batches: Mapping[int, MiniBatch]
    """By their number in the step, from 0."""
    losses: Sequence[Tensor]
    """Of each micro-batch this rank's share; empty where they are not known."""


def write_dump(folder: Path, refused: Refused, samples: Samples, rank: ModelRank) -> None:
    """Write this replica's part of what was refused; all ranks together, since the model is asked once more."""
    parts = [
        (number, batch, [batch.samples[i] for i in indices])
        for number, batch in refused.batches.items()
        for indices in batch.micro_batches
    ]
    trajectories = [[samples.trajectory(ref) for ref in refs] for _, _, refs in parts]
    found = rank.of_sequences(trajectories, _values if rank.model.head == "value" else _logprobs)
    if not rank.is_last or rank.groups.tp.rank() or rank.groups.cp.rank():
        return
    said = f"model_{'values' if rank.model.head == 'value' else 'logprobs'}"
    rows: list[dict[str, Any]] = []
    micro_batches: list[dict[str, Any]] = []
    for (number, batch, refs), of_micro_batch in zip(parts, found, strict=True):
        place = {"mini_batch": number, "micro_batch": len(micro_batches)}
        for ref, found_1n in zip(refs, of_micro_batch, strict=True):
            # position i speaks of token i + 1
            rows.append(place | _row(batch, ref, samples) | {said: [0.0, *found_1n[0, :-1].tolist()]})
        prompt_ids = [samples.trajectory(ref).prompt_id for ref in refs]
        finite = bool(refused.losses[len(micro_batches)].isfinite()) if refused.losses else None
        micro_batches.append(place | {"loss_is_finite": finite, "prompt_ids": prompt_ids})
    summary = {
        "what": refused.text,
        "rank": dist.get_rank(),
        "not_finite": list(_not_finite(rows)),
        "micro_batches": micro_batches,
    }
    name = f"rank-{dist.get_rank()}"
    with replaced(folder / f"{name}.parquet") as draft:
        pq.write_table(pa.Table.from_pylist(rows), draft, compression="zstd")
    with replaced(folder / f"{name}.json") as draft:
        draft.write_text(json.dumps(summary, indent=1) + "\n")


def _row(batch: MiniBatch, ref: SampleRef, samples: Samples) -> dict[str, Any]:
    t = samples.trajectory(ref)
    columns = {name: samples.column(name, ref) for name in samples.names(batch)}
    return {
        "prompt_id": t.prompt_id,
        "group_id": t.group_id,
        "reward": float(t.reward),
        "finish_reason": t.finish_reason,
        "token_ids": t.token_ids.tolist(),
        "loss_mask": t.loss_mask.tolist(),
        "policy_versions": t.policy_versions.tolist(),
        "logprobs": t.logprobs.tolist(),
        **{name: v.tolist() if isinstance(v, np.ndarray) else float(v) for name, v in columns.items()},
    }


def _not_finite(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows with a field that is not finite."""
    for number, row in enumerate(rows):
        numbers = {name: v for name, v in row.items() if isinstance(v, float | list)}
        fields = [name for name, v in numbers.items() if not np.isfinite(v).all()]
        if fields:
            yield {"row": number, "prompt_id": row["prompt_id"], "fields": fields}


def _logprobs(logits_tv: Tensor, packed: LocalPack) -> Tensor:
    return token_logprobs(logits_tv, packed.batch.target_ids_T)[None]


def _values(values_t1: Tensor, _: LocalPack) -> Tensor:
    return values_t1.T
