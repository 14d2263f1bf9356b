"""Computes a loss and its metrics from the output of the model for a micro-batch.

Shapes: T tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megarl.batch.pack import PackedBatch
from megarl.functional import Denominators, Sequences
from megarl.functional.losses import clamp_log_ratio
from megarl.megatron.losses.loss import AnyLoss, LossBatch, ModelOutput, ValueHeadLoss, token_scores, token_values
from megarl.megatron.requests import RATIO_MEAN, RATIO_SQUARE_MEAN, MiniBatch, TrainRequest
from megarl.megatron.training.metric_sums import MetricSums
from megarl.megatron.training.samples import POLICY_VERSIONS


@dataclass(frozen=True)
class LossComputation:
    """Computes the loss of one mini-batch, micro-batch by micro-batch, and adds its metrics."""

    loss: AnyLoss
    denominators: Denominators
    """Global token and sequence counts of the mini-batch."""
    groups: ProcessGroupCollection

    def __call__(self, scores: ModelOutput, pack: PackedBatch, metrics: MetricSums) -> Tensor:
        """Return this micro-batch's share of the loss, a scalar, from the model's output."""
        batch = self._loss_batch(pack)
        if isinstance(self.loss, ValueHeadLoss):
            output = self.loss(token_values(scores), batch)
        else:
            tokens = token_scores(scores)
            metrics.add("entropy", batch.token_mean(tokens.entropy_T))
            output = self.loss(tokens, batch)
        for name, value in output.metrics.items():
            metrics.add(name, value)
        for name, value in output.maxima.items():
            metrics.update_max(name, value)
        metrics.add("loss", output.loss)
        return output.loss

    def _loss_batch(self, pack: PackedBatch) -> LossBatch:
        cp_size: int = self.groups.cp.size()
        sequences = Sequences(
            ids_T=pack.sequence_ids_T,
            count=len(pack.cu_seqlens_S) - 1,
            reduce=_make_all_reduce(self.groups.cp) if cp_size > 1 else None,
        )
        return LossBatch(pack=pack, denominators=self.denominators, sequences=sequences, cp_size=cp_size)


def add_mismatch_metrics(pack: PackedBatch, batch: MiniBatch, request: TrainRequest, metrics: MetricSums) -> None:
    """Add metrics of the difference between trainer and engine log-probabilities of the sampled tokens.

    If tokens may be of older policies, the metrics of the mismatch are of the current policy's tokens only, and absent
    if there are none. The difference to the older policies, which have trained since, goes into the metrics `drift/`.

    Args:
        pack: a pack of the mini-batch, with the column `old_logprobs`.
    """
    versions, num_tokens, num_updates = request.versions, batch.denominators.num_tokens, len(request.mini_batches)
    difference_T = torch.where(pack.mask_T, pack.columns["old_logprobs"] - pack.rollout_logprobs_T, 0.0)
    if versions is None:
        _add_differences(difference_T, pack.mask_T, num_tokens, metrics)
        return
    current_T = pack.mask_T & (pack.columns[POLICY_VERSIONS] == versions.current)
    if versions.num_current_tokens:  # the metrics are means over the mini-batches
        current = torch.where(current_T, difference_T, 0.0)
        _add_differences(current, current_T, versions.num_current_tokens / num_updates, metrics)
    older_T = torch.where(current_T, 0.0, difference_T)
    metrics.add("drift/logprob_abs_mean", older_T.abs().sum() / num_tokens)
    metrics.add("drift/kl", _k3(older_T).sum() / num_tokens)
    ratio_T = torch.where(pack.mask_T, clamp_log_ratio(difference_T).exp(), 0.0)
    metrics.add(RATIO_MEAN, ratio_T.sum() / num_tokens)
    metrics.add(RATIO_SQUARE_MEAN, ratio_T.square().sum() / num_tokens)


def _add_differences(difference_T: Tensor, mask_T: Tensor, num_tokens: float, metrics: MetricSums) -> None:
    """Add the metrics of the mismatch; `num_tokens`: tokens of the mini-batch on all ranks."""
    metrics.update_max("train_infer_mismatch/logprob_abs_max", difference_T.abs().max())
    metrics.add_values("train_infer_mismatch/logprob_abs_p99", difference_T.abs(), mask_T)
    metrics.add("train_infer_mismatch/logprob_abs_mean", difference_T.abs().sum() / num_tokens)
    metrics.add("train_infer_mismatch/kl", _k3(difference_T).sum() / num_tokens)


def _k3(difference_T: Tensor) -> Tensor:
    """Return the k3 estimate of KL(rollout || trainer), Schulman 2020: e^x - 1 - x >= 0, finite for any finite x."""
    difference_T = clamp_log_ratio(difference_T)
    return difference_T.exp() - 1 - difference_T


def _make_all_reduce(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return a differentiable all-reduce (sum) over the group."""

    def reduce(value: Tensor) -> Tensor:
        total: Tensor = _AllReduce.apply(value, group)  # type: ignore[no-untyped-call]
        return total

    return reduce


class _AllReduce(torch.autograd.Function):
    """All-reduce (sum) whose backward pass all-reduces the gradients of the ranks."""

    @staticmethod
    def forward(ctx, value: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: ANN001
        ctx.group = group
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]  # noqa: ANN001
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
