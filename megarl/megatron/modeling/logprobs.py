"""Log-probabilities and entropy from vocabulary-parallel logits.

Shapes: T tokens of this rank, v = V/tp share of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def token_logprobs(logits_Tv: Tensor, target_ids_T: Tensor) -> Tensor:
    """Return the log-probability of each target, float32 [T], from logits [T, V/tp]. Differentiable.

    Overwrites `logits_Tv`.
    """
    loss_T1 = vocab_parallel_cross_entropy(logits_Tv.float()[:, None], target_ids_T[:, None])
    logprobs_T: Tensor = -loss_T1[:, 0]
    return logprobs_T


@torch.no_grad()
def token_entropy(logits_Tv: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the entropy of each position's distribution in nats, float32 [T], from logits [T, V/tp]."""
    logits_Tv = logits_Tv.float()
    top_T = logits_Tv.amax(-1)
    dist.all_reduce(top_T, dist.ReduceOp.MAX, group=group)
    shifted_Tv = logits_Tv - top_T[:, None]
    weights_Tv = shifted_Tv.exp()
    sums_2T = torch.stack([weights_Tv.sum(-1), (weights_Tv * shifted_Tv).sum(-1)])
    dist.all_reduce(sums_2T, group=group)
    return sums_2T[0].log() - sums_2T[1] / sums_2T[0]
