"""Log-probabilities and entropies by torch's own log_softmax, in float64, random inputs, and calls of the ops."""

import torch
from torch import Tensor

from megarl_kernels import linear_logprob_entropy, logprob_entropy_

OPTIONS = [
    {},
    {"inv_temperature": 1.7},
    {"softcap": 5.0},
    {"inv_temperature": 0.6, "softcap": 2.0},
]


def plain_scores(logits_tv: Tensor, targets_t: Tensor, *, inv_temperature=1.0, softcap=None) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies [t] from all columns, in the dtype of `logits_tv`."""
    if softcap is not None:
        logits_tv = softcap * torch.tanh(logits_tv / softcap)
    logprobs_tv = torch.log_softmax(logits_tv * inv_temperature, dim=-1)
    entropy_t = -(logprobs_tv.exp() * logprobs_tv).sum(-1)
    return logprobs_tv.gather(1, targets_t[:, None])[:, 0], entropy_t


def random_inputs(t: int, v: int, h: int, *, dtype=torch.float64, seed=0) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [t, h], a weight [v, h] and targets [t]; the logits have a standard deviation of about 3."""
    g = torch.Generator().manual_seed(seed)
    hidden_th = torch.randn(t, h, generator=g, dtype=torch.float64).to(dtype)
    weight_vh = (torch.randn(v, h, generator=g, dtype=torch.float64) * 3 / h**0.5).to(dtype)
    return hidden_th, weight_vh, torch.randint(v, (t,), generator=g)


def fused(op, hidden, weight, targets, **options):
    """Call one of the two ops, both from hidden states."""
    if op == "linear":
        return linear_logprob_entropy(hidden, weight, targets, **options)
    return logprob_entropy_(hidden @ weight.t(), targets, **options)


def gradients(results, tensors, seed=1):
    """Return the gradients of a random combination of the results."""
    g = torch.Generator().manual_seed(seed)
    factors = [torch.randn(r.shape, generator=g, dtype=torch.float64).to(r) for r in results]
    return torch.autograd.grad(results, tensors, factors)
