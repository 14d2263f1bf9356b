"""Checks that reject updates: non-finite loss or gradient, gradient norm, log-probability mismatch.

All ranks reduce the checked values first and so decide alike, before weights or optimizer state change. The decision is
the host's, which waits for the device once for it, and once more in a step that checks the mismatch.

Batches whose updates were rejected are written to files, for diagnosis:

    <folder>/rank-<n>.parquet   one row per sequence of the replica: tokens, columns, model log-probabilities
    <folder>/rank-<n>.json      the reason, the prompts of each micro-batch, non-finite fields by row

<n> is the output rank of its data-parallel replica. Value models write values instead of log-probabilities.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch.pack import SampleRef
from megarl.cluster.process.atomic_files import atomic_write
from megarl.config.limits import LimitConfig
from megarl.errors import LimitError
from megarl.losses import ModelOutput, token_scores, token_values
from megarl.megatron.modeling.megatron_model import MegatronModel
from megarl.megatron.request_samples import StepSamples
from megarl.megatron.requests import MISMATCH_MESSAGE, MISMATCH_METRICS, MiniBatch, TrainRequest
from megarl.megatron.runtime import platform
from megarl.megatron.training.metric_sums import DeviceMetrics, all_reduce_max
from megarl.megatron.training.optimizer import gradient_norm


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


RejectReason = Literal["not_finite", "grad_norm", "mismatch"]


class UpdateGuard:
    """Applies the `UpdateGuardSpec` of one training step on this rank and counts skipped updates."""

    def __init__(self, request: TrainRequest, samples: StepSamples, model: MegatronModel) -> None:
        self._request, self._samples, self._model = request, samples, model
        self._skipped: dict[RejectReason, int] = {"not_finite": 0, "grad_norm": 0, "mismatch": 0}
        self._attempts, self._is_dumped = 0, False
        self._norms: list[float] = []
        self._largest_norm: float | None = None

    @property
    def updates(self) -> int:
        """Number of updates allowed so far."""
        return len(self._norms)

    def metrics(self) -> dict[str, float]:
        """Return counts of updates made and skipped by reason, their mean gradient norm, and the largest norm seen.

        `grad_norm` averages over the updates made; `grad_norm_max` includes rejected ones, if finite.
        """
        out = {"updates": float(self.updates)}
        out |= {f"skipped/{reason}": float(count) for reason, count in self._skipped.items()}
        if self._norms:
            out["grad_norm"] = sum(self._norms) / len(self._norms)
        if self._largest_norm is not None:
            out["grad_norm_max"] = self._largest_norm
        return out

    @property
    def checks_mismatch(self) -> bool:
        """Whether `allows_step` compares anything."""
        return bool(self._mismatch_limits)

    def allows_step(self, mismatch: DeviceMetrics) -> bool:
        """Return whether any update of this step may be made. Called once, before the first.

        Args:
            mismatch: has `MISMATCH_METRICS`, reduced over data-parallel ranks; empty except on the last pipeline stage.

        Raises:
            LimitError: the mismatch exceeds a limit whose action is `stop`.
        """
        limits = self._mismatch_limits
        if not limits:
            return True
        zero = torch.zeros((), dtype=torch.float64, device=platform.device())
        names = [MISMATCH_METRICS[key] for key in limits]
        values = torch.stack([mismatch[name] if name in mismatch.names else zero for name in names])
        worst: list[float] = all_reduce_max(values).tolist()
        notes = self._request.guard.mismatch_notes
        found = {
            key: text + notes.get(key, "")
            for (key, limit), value in zip(limits.items(), worst, strict=True)
            if (text := limit.violation(key, MISMATCH_METRICS[key], value)) is not None
        }
        if not found:
            return True
        action: Literal["skip", "stop"] = "stop" if any(limits[key].action == "stop" for key in found) else "skip"
        batches = dict(enumerate(self._request.mini_batches))
        reason = f"{'; '.join(found.values())}: {MISMATCH_MESSAGE}"
        rejected = RejectedBatch(reason=reason, batches=batches, losses=())
        self._reject("mismatch", action, rejected, updates=len(batches) * self._request.epochs)
        return False

    @property
    def _mismatch_limits(self) -> dict[str, LimitConfig]:
        return {key: limit for key, limit in self._request.guard.mismatch.items() if limit.action != "warn"}

    def check_update(self, batch: MiniBatch, losses: Sequence[Tensor], squares: Tensor) -> float | None:
        """Return the gradient norm if the step's next update may be made, else None.

        Args:
            losses: this rank's share of the loss of each micro-batch; empty except on the last pipeline stage.
            squares: `squared_norms` of the gradient before clipping.

        Raises:
            LimitError: the update is rejected and the action is `stop`.
        """
        number = self._attempts % len(self._request.mini_batches)
        self._attempts += 1
        world, squares = dist.get_world_size(), squares.double()
        # the maximum of world - rank identifies the lowest rank with a bad loss; 0: none
        code = torch.zeros_like(squares[:1])
        if losses:
            code.masked_fill_(~torch.stack(list(losses)).isfinite().all(), world - dist.get_rank())
        worst = all_reduce_max(torch.cat([code, squares]))
        failed_rank_code, *norm_squares = torch.cat([worst, squares]).tolist()
        norm = gradient_norm(norm_squares[: len(squares)])
        grad_norm = gradient_norm(norm_squares[len(squares) :])
        if math.isfinite(norm):
            self._largest_norm = norm if self._largest_norm is None else max(norm, self._largest_norm)
        spec, description = self._request.guard, f"mini-batch {number + 1} of {len(self._request.mini_batches)}"
        reason: RejectReason = "not_finite"
        action: Literal["skip", "stop"] = spec.not_finite
        text: str | None = None
        if failed_rank_code:
            text = f"the loss of {description} is not finite, on rank {world - int(failed_rank_code)}"
        elif not math.isfinite(norm):
            text = f"the gradient of {description} is not finite: its norm is {norm}"
        elif spec.grad_norm is not None and spec.grad_norm.action != "warn":
            reason, action = "grad_norm", spec.grad_norm.action
            text = spec.grad_norm.violation("grad_norm", f"grad_norm of {description}", norm)
        if text is None:
            self._norms.append(grad_norm)
            return grad_norm
        self._reject(reason, action, RejectedBatch(reason=text, batches={number: batch}, losses=losses))
        return None

    def _reject(
        self, reason: RejectReason, action: Literal["skip", "stop"], rejected: RejectedBatch, *, updates: int = 1
    ) -> None:
        where = self._dump(rejected) if action == "stop" or not self._is_dumped else ""
        if action == "stop":
            raise LimitError(f"{rejected.reason}{where}")
        self._skipped[reason] += updates

    def _dump(self, rejected: RejectedBatch) -> str:
        """Dump the batch if a folder is configured. Returns the clause that the error message reports it with."""
        if self._request.guard.dump_folder is None:
            return ""
        self._is_dumped = True
        folder = Path(self._request.guard.dump_folder)
        folder /= f"update-{self._attempts}" if self._attempts else "mismatch"
        failed = 0.0
        try:
            write_dump(folder, rejected, self._samples, self._model)
        except OSError:  # a full disk must not hide the reason for the rejection
            failed = 1.0
        (failed,) = all_reduce_max(torch.tensor([failed], dtype=torch.float64, device=platform.device())).tolist()
        return f"; the batch could not be written to {folder}" if failed else f"; the batch is in {folder}"
