"""Computes a loss and its metrics from the output of the model for a micro-batch.

Shapes: T tokens of this rank, v = V/tp share of the vocabulary (1 for value models). Names end in their shape:
`logits_Tv` is [T, V/tp].
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
from megarl.megatron.losses.loss import AnyLoss, LossBatch, TokenScores, ValueHeadLoss
from megarl.megatron.modeling.logprobs import token_entropy, token_logprobs
from megarl.megatron.training.metric_sums import MetricSums


@dataclass(frozen=True)
class LossComputation:
    """Computes the loss of one mini-batch, micro-batch by micro-batch, and adds its metrics."""

    loss: AnyLoss
    denominators: Denominators
    """Global token and sequence counts of the mini-batch."""
    groups: ProcessGroupCollection

    def __call__(self, logits_Tv: Tensor, pack: PackedBatch, metrics: MetricSums) -> Tensor:
        """Return this micro-batch's share of the loss, a scalar, from logits [T, V/tp] (values [T, 1]).

        Overwrites `logits_Tv`.
        """
        batch = self._loss_batch(pack)
        if isinstance(self.loss, ValueHeadLoss):
            output = self.loss(logits_Tv[:, 0], batch)
        else:
            entropy_T = token_entropy(logits_Tv.detach(), self.groups.tp)
            metrics.add("entropy", batch.token_mean(entropy_T))
            output = self.loss(
                TokenScores(logprobs_T=token_logprobs(logits_Tv, pack.target_ids_T), entropy_T=entropy_T), batch
            )
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


def add_mismatch_metrics(batch: PackedBatch, num_tokens: int, metrics: MetricSums) -> None:
    """Add metrics of the difference between trainer and engine log-probabilities of the sampled tokens.

    Args:
        num_tokens: sampled tokens of the mini-batch on all ranks.
    """
    difference_T = torch.where(batch.mask_T, batch.columns["old_logprobs"] - batch.rollout_logprobs_T, 0.0)
    metrics.update_max("train_infer_mismatch/logprob_abs_max", difference_T.abs().max())
    metrics.add("train_infer_mismatch/logprob_abs_mean", difference_T.abs().sum() / num_tokens)
    # k3 estimate of KL(rollout || trainer), Schulman 2020: e^x - 1 - x >= 0
    metrics.add("train_infer_mismatch/kl", (difference_T.exp() - 1 - difference_T).sum() / num_tokens)


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
