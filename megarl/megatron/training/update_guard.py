"""Checks that reject updates: non-finite loss or gradient, gradient norm, log-probability mismatch.

All ranks reduce the checked values first and so decide alike, before weights or optimizer state change. The decision is
the host's, which waits for the device once for it, and once more in a step that checks the mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.limits import LimitConfig
from megarl.errors import LimitError
from megarl.megatron.modeling.megatron_model import MegatronModel
from megarl.megatron.requests import MISMATCH_MESSAGE, MISMATCH_METRICS, MiniBatch, TrainRequest
from megarl.megatron.runtime import platform
from megarl.megatron.training.metric_sums import DeviceMetrics, all_reduce_max
from megarl.megatron.training.optimizer import gradient_norm
from megarl.megatron.training.rejected_batch import RejectedBatch, write_dump
from megarl.megatron.training.samples import StepSamples

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
