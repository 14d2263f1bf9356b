"""Statistics from which log-probability and entropy follow, and which add up over tiles and ranks.

Each row of a statistics tensor [t, 4] describes the scores x of one token in some columns of the vocabulary:

    0  m       the largest score
    1  s       sum of exp(x - m)
    2  u       sum of (x - m) exp(x - m)
    3  target  the score of the token's target, 0 if it is not in these columns

Over all columns, with z = m + log s: the log-probability of the target is target - z, the entropy log s - u / s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl_kernels.vocab_shard import VocabShard


def empty_statistics(num_tokens: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the statistics [t, 4] of no columns."""
    statistics = torch.zeros(num_tokens, 4, dtype=dtype, device=device)
    # finite, since (m - m') * 0 has to be 0
    statistics[:, 0] = torch.finfo(dtype).min
    return statistics


def add_tile_(statistics: Tensor, scores: Tensor, columns_of_targets: Tensor) -> None:
    """Add the columns of `scores` [t, c] to `statistics`. Overwrites `scores`.

    Args:
        columns_of_targets: int64 [t], relative to this tile; targets outside of it are below 0 or at least c.
    """
    m, s, u, target = statistics.unbind(1)
    target.add_(_select(scores, columns_of_targets))
    top = torch.maximum(m, scores.amax(1))
    change = m - top
    decay = change.exp()
    u.addcmul_(change, s).mul_(decay)
    s.mul_(decay)
    m.copy_(top)
    shifted = scores.sub_(top[:, None])
    weights = shifted.exp()
    s.add_(weights.sum(1))
    u.add_(weights.mul_(shifted).sum(1))


def merge(parts: Tensor) -> Tensor:
    """Return the statistics [t, 4] of all columns, from those of disjoint parts of the columns, [parts, t, 4]."""
    m, s, u, target = parts.unbind(2)
    top = m.amax(0)
    change = m - top
    decay = change.exp()
    return torch.stack([top, (decay * s).sum(0), (decay * (u + change * s)).sum(0), target.sum(0)], dim=1)


def merge_ranks(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the statistics of all ranks' columns, in one all-gather."""
    if group is None or group.size() == 1:
        return statistics
    parts = statistics.new_empty(group.size(), *statistics.shape)
    dist.all_gather(list(parts.unbind(0)), statistics, group=group)
    return merge(parts)


def finish(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies and log partition functions, [t] each, from statistics of all columns."""
    m, s, u, target = statistics.unbind(1)
    log_s = s.log()
    log_z = m + log_s
    return target - log_z, log_s - u / s, log_z


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGradients:
    """The gradients of the results, and what the backward pass needs of them; [t] each."""

    entropy: Tensor
    log_z: Tensor
    grad_logprobs: Tensor | None
    grad_entropy: Tensor | None

    def __getitem__(self, rows: slice) -> OutputGradients:
        """Return the gradients of some tokens."""
        return OutputGradients(
            entropy=self.entropy[rows],
            log_z=self.log_z[rows],
            grad_logprobs=None if self.grad_logprobs is None else self.grad_logprobs[rows],
            grad_entropy=None if self.grad_entropy is None else self.grad_entropy[rows],
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the four fields as contiguous tensors, absent gradients as zeros."""
        grad_logprobs, grad_entropy = (
            torch.zeros_like(self.log_z) if x is None else x.contiguous()
            for x in (self.grad_logprobs, self.grad_entropy)
        )
        return self.entropy.contiguous(), self.log_z.contiguous(), grad_logprobs, grad_entropy


def gradient_(scores: Tensor, columns_of_targets: Tensor, shard: VocabShard, outputs: OutputGradients) -> Tensor:
    """Return the gradient by the logits, in the memory of their `scores` [t, c].

    By the score x_j with probability p_j: of the log-probability, [j is the target] - p_j; of the entropy,
    -p_j (log p_j + entropy).
    """
    grad_logprobs, grad_entropy = outputs.grad_logprobs, outputs.grad_entropy
    slopes = shard.slopes(scores)
    logprobs = scores.sub_(outputs.log_z[:, None])
    if grad_entropy is None:
        assert grad_logprobs is not None
        grad = logprobs.exp_().mul_(-grad_logprobs[:, None])
    else:
        probabilities = logprobs.exp()
        grad = logprobs.add_(outputs.entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_logprobs is not None:
            grad.sub_(grad_logprobs[:, None])
        grad.mul_(probabilities)
    if grad_logprobs is not None:
        inside = (columns_of_targets >= 0) & (columns_of_targets < scores.shape[1])
        at = columns_of_targets.clamp(0, scores.shape[1] - 1)
        grad.scatter_add_(1, at[:, None], torch.where(inside, grad_logprobs, 0.0).to(grad.dtype)[:, None])
    return grad.mul_(slopes)


def _select(scores: Tensor, columns: Tensor) -> Tensor:
    """Return the score in each row's column, [t]; 0 where the column is outside of the tile."""
    inside = (columns >= 0) & (columns < scores.shape[1])
    found = scores.gather(1, columns.clamp(0, scores.shape[1] - 1)[:, None])[:, 0]
    return torch.where(inside, found, 0.0)
