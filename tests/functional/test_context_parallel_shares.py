"""Losses of sequences split over context-parallel ranks equal those of the full pack.

Two threads stand in for the ranks; they share one autograd graph, so that gradients are summed over the ranks.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier

import pytest
import torch
from torch import Tensor

from megarl.functional.losses import Sequences, rollout_correction
from tests.functional.packs import LOSSES, Pack, gradient, make_pack, outcome_loss
from tests.time_limits import HANG_SECONDS

RANKS = 2


def per_rank(pack: Pack, function: Callable[[Pack], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return by rank the indices of its tokens (every other token of the pack) and the function's result on them."""
    barrier, brought = Barrier(RANKS, timeout=HANG_SECONDS), {}

    def all_reduce(rank: int, sums_S: Tensor) -> Tensor:
        brought[rank] = sums_S
        barrier.wait()
        total_S = brought[0] + brought[1]
        barrier.wait()
        return total_S

    index, parts = [torch.arange(rank, len(pack.mask_T), RANKS) for rank in range(RANKS)], []
    for rank, own in enumerate(index):
        sequences = Sequences(pack.sequences.ids_T[own], pack.sequences.count, partial(all_reduce, rank))
        parts.append(replace(pack.select(own), sequences=sequences))
    with ThreadPoolExecutor(RANKS) as ranks:
        return index, list(ranks.map(function, parts))


def merged_shares(pack: Pack, function: Callable[[Pack], Tensor]) -> Tensor:
    index, shares = per_rank(pack, function)
    return torch.zeros_like(pack.logprobs_T).index_copy(0, torch.cat(index), torch.cat(shares).double())


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_of_two_shares_equal_the_full_pack(name: str) -> None:
    pack = make_pack(2)
    loss = LOSSES[name]
    assert torch.allclose(merged_shares(pack, loss), loss(pack), rtol=1e-12)

    def full(logprobs_T: Tensor) -> Tensor:
        return (loss(pack.with_logprobs(logprobs_T)) * pack.mask_T).sum()

    def in_shares(logprobs_T: Tensor) -> Tensor:
        return (merged_shares(pack.with_logprobs(logprobs_T), loss) * pack.mask_T).sum()

    assert torch.allclose(gradient(in_shares, pack.logprobs_T), gradient(full, pack.logprobs_T), rtol=1e-10)


def test_both_ranks_compute_the_same_outcome_loss() -> None:
    pack = make_pack(2)
    _, losses = per_rank(pack, outcome_loss)
    for loss_S in losses:
        assert torch.allclose(loss_S, outcome_loss(pack), rtol=1e-12)

    def counted_once(logprobs_T: Tensor) -> Tensor:
        return torch.stack(per_rank(pack.with_logprobs(logprobs_T), outcome_loss)[1]).sum() / RANKS

    want = gradient(lambda logprobs_T: outcome_loss(pack.with_logprobs(logprobs_T)).sum(), pack.logprobs_T)
    assert torch.allclose(gradient(counted_once, pack.logprobs_T), want, rtol=1e-10)


@pytest.mark.parametrize("kind", ["token_tis", "sequence_tis", "icepop", "geometric_mask"])
def test_corrections_of_two_shares_equal_the_full_pack(kind: str) -> None:
    pack = make_pack(2, spread=0.3)

    def weights(part: Pack) -> Tensor:
        correction = rollout_correction(
            part.old_logprobs_T, part.behave_logprobs_T, part.mask_T, part.sequences, kind=kind, low=0.9, high=1.3
        )
        return torch.where(correction.keep_T, correction.weights_T, -1.0)

    assert torch.allclose(merged_shares(pack, weights), weights(pack), rtol=1e-12)
