"""Checks that reject updates: non-finite loss or gradient, gradient norm, log-probability mismatch.

All ranks reduce the checked values first and so decide alike, before weights or optimizer state change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import LimitError
from megarl.megatron.modeling.megatron_model import MegatronModel
from megarl.megatron.requests import LOGPROB_MISMATCH, MISMATCH_MESSAGE, MiniBatch, TrainRequest
from megarl.megatron.runtime import platform
from megarl.megatron.training.metric_sums import all_reduce_max
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

    def allows_step(self, mismatch: float) -> bool:
        """Return whether any update of this step may be made. Called once, before the first.

        Args:
            mismatch: largest |trainer - engine| log-probability of this rank's tokens.

        Raises:
            LimitError: the mismatch exceeds its limit and the action is `stop`.
        """
        limit = self._request.guard.mismatch
        if limit is None or limit.action == "warn":
            return True
        (worst,) = _all_reduce_max([mismatch])
        text = limit.violation("logprob_abs_max", LOGPROB_MISMATCH, worst)
        if text is None:
            return True
        batches = dict(enumerate(self._request.mini_batches))
        rejected = RejectedBatch(reason=f"{text}: {MISMATCH_MESSAGE}", batches=batches, losses=())
        self._reject("mismatch", limit.action, rejected, updates=len(batches) * self._request.epochs)
        return False

    def allows_update(self, batch: MiniBatch, losses: Sequence[Tensor], grad_norm: float) -> bool:
        """Return whether the step's next update may be made.

        Args:
            losses: this rank's share of the loss of each micro-batch; empty except on the last pipeline stage.
            grad_norm: gradient norm before clipping.

        Raises:
            LimitError: the update is rejected and the action is `stop`.
        """
        number = self._attempts % len(self._request.mini_batches)
        self._attempts += 1
        has_bad_loss = bool(losses) and not bool(torch.stack(list(losses)).isfinite().all())
        world = dist.get_world_size()
        # the maximum of world - rank identifies the lowest rank with a bad loss; 0: none
        failed_rank_code, norm = _all_reduce_max([float(world - dist.get_rank()) if has_bad_loss else 0.0, grad_norm])
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
            return True
        self._reject(reason, action, RejectedBatch(reason=text, batches={number: batch}, losses=losses))
        return False

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
        (failed,) = _all_reduce_max([failed])
        return f"; the batch could not be written to {folder}" if failed else f"; the batch is in {folder}"


def _all_reduce_max(values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over all ranks; NaN wins."""
    out: list[float] = all_reduce_max(torch.tensor(values, dtype=torch.float64, device=platform.device())).tolist()
    return out
