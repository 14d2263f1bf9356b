"""Whether a step's updates are made. All ranks see the same and decide alike, before anything has changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import LimitError
from megarl.megatron.modeling.megatron_model import ModelRank
from megarl.megatron.requests import DISAGREE, MISMATCH, MiniBatch, TrainWork
from megarl.megatron.runtime import platform
from megarl.megatron.training.metric_sums import largest
from megarl.megatron.training.rejected_batch import Refused, write_dump
from megarl.megatron.training.samples import Samples

Reason = Literal["not_finite", "grad_norm", "mismatch"]


class StepWatch:
    """The guard of one controller step on this rank."""

    def __init__(self, work: TrainWork, samples: Samples, rank: ModelRank) -> None:
        self._work, self._samples, self._rank = work, samples, rank
        self._skipped: dict[Reason, int] = {"not_finite": 0, "grad_norm": 0, "mismatch": 0}
        self._attempts, self._is_dumped = 0, False
        self._norms: list[float] = []
        self._largest_norm: float | None = None

    @property
    def updates(self) -> int:
        """How many were made."""
        return len(self._norms)

    def metrics(self) -> dict[str, float]:
        """Updates made and left out, for which reason; the mean gradient norm of those made, the largest of all."""
        out = {"updates": float(self.updates)}
        out |= {f"skipped/{reason}": float(count) for reason, count in self._skipped.items()}
        if self._norms:
            out["grad_norm"] = sum(self._norms) / len(self._norms)
        if self._largest_norm is not None:
            out["grad_norm_max"] = self._largest_norm
        return out

    def allows_step(self, mismatch: float) -> bool:
        """Whether updates may be made at all.

        Args:
            mismatch: the largest of this rank's tokens.

        Raises:
            LimitError: where the guard says `stop`.
        """
        limit = self._work.guard.mismatch
        if limit is None or limit.action == "warn":
            return True
        (worst,) = _largest_of_all([mismatch])
        text = limit.refusal("logprob_abs_max", MISMATCH, worst)
        if text is None:
            return True
        batches = dict(enumerate(self._work.mini_batches))
        refused = Refused(text=f"{text}: {DISAGREE}", batches=batches, losses=())
        self._refuse("mismatch", limit.action, refused, updates=len(batches) * self._work.epochs)
        return False

    def allows_update(self, batch: MiniBatch, losses: Sequence[Tensor], grad_norm: float) -> bool:
        """Whether the next of the step's updates may be made.

        Args:
            losses: this rank's share of each micro-batch's; empty on all stages but the last.
            grad_norm: before clipping.

        Raises:
            LimitError: where the guard says `stop`.
        """
        number = self._attempts % len(self._work.mini_batches)
        self._attempts += 1
        lost = bool(losses) and not bool(torch.stack(list(losses)).isfinite().all())
        world = dist.get_world_size()
        origin, norm = _largest_of_all([float(world - dist.get_rank()) if lost else 0.0, grad_norm])
        if math.isfinite(norm):
            self._largest_norm = norm if self._largest_norm is None else max(norm, self._largest_norm)
        guard, which = self._work.guard, f"mini-batch {number + 1} of {len(self._work.mini_batches)}"
        reason: Reason = "not_finite"
        action: Literal["skip", "stop"] = guard.not_finite
        text: str | None = None
        if origin:
            text = f"the loss of {which} is not finite, on rank {world - int(origin)}"
        elif not math.isfinite(norm):
            text = f"the gradient of {which} is not finite: its norm is {norm}"
        elif guard.grad_norm is not None and guard.grad_norm.action != "warn":
            reason, action = "grad_norm", guard.grad_norm.action
            text = guard.grad_norm.refusal("grad_norm", f"grad_norm of {which}", norm)
        if text is None:
            self._norms.append(grad_norm)
            return True
        self._refuse(reason, action, Refused(text=text, batches={number: batch}, losses=losses))
        return False

    def _refuse(self, reason: Reason, action: Literal["skip", "stop"], refused: Refused, *, updates: int = 1) -> None:
        where = self._dump(refused) if action == "stop" or not self._is_dumped else ""
        if action == "stop":
            raise LimitError(f"{refused.text}{where}")
        self._skipped[reason] += updates

    def _dump(self, refused: Refused) -> str:
        """What there is to say of the dump, once all ranks have written theirs."""
        if self._work.guard.dump_folder is None:
            return ""
        self._is_dumped = True
        folder = Path(self._work.guard.dump_folder)
        folder /= f"update-{self._attempts}" if self._attempts else "mismatch"
        failed = 0.0
        try:
            write_dump(folder, refused, self._samples, self._rank)
        except OSError:  # a full disk is not to hide why the run ends
            failed = 1.0
        (failed,) = _largest_of_all([failed])
        return f"; the batch could not be written to {folder}" if failed else f"; the batch is in {folder}"


def _largest_of_all(values: Sequence[float]) -> list[float]:
    """Each value's largest on any rank, NaN above all."""
    out: list[float] = largest(torch.tensor(values, dtype=torch.float64, device=platform.device())).tolist()
    return out
