"""Sums, means and spreading over the sequences of a pack."""

from __future__ import annotations

import torch

from megarl.functional.sequences import Sequences
from tests.functional.packs import gradient, iter_sequences, make_pack, numerical_gradient

CU_SEQLENS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)


def test_ids_handle_an_empty_sequence() -> None:
    sequences = Sequences.of(CU_SEQLENS)
    assert sequences.count == 3
    assert sequences.ids_T.tolist() == [0, 0, 2, 2, 2]
    assert sequences.ids_T.dtype == torch.int64


def test_sum_mean_and_spread() -> None:
    sequences = Sequences.of(CU_SEQLENS)
    values = torch.tensor([1.0, 2.0, 3.0, torch.inf, 5.0])
    mask = torch.tensor([False, False, True, False, True])
    assert sequences.sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist() == [3.0, 0.0, 12.0]
    assert sequences.mean(values, mask).tolist() == [0.0, 0.0, 4.0]
    assert sequences.spread(torch.tensor([7, 8, 9])).tolist() == [7, 7, 9, 9, 9]


def test_mean_matches_a_loop_and_is_differentiable() -> None:
    pack = make_pack()
    want = [v[m].mean() if m.any() else 0.0 for m, v in iter_sequences(pack, pack.values_T)]
    got = pack.sequences.mean(pack.values_T, pack.mask_T)
    assert torch.allclose(got, torch.tensor(want), atol=1e-12)

    def squares(values: torch.Tensor) -> torch.Tensor:
        return pack.sequences.spread(pack.sequences.mean(values, pack.mask_T)).square().sum()

    assert torch.allclose(gradient(squares, pack.values_T), numerical_gradient(squares, pack.values_T), atol=1e-8)


def test_sums_of_other_ranks_are_added() -> None:
    full = Sequences.of(CU_SEQLENS)
    elsewhere = torch.tensor([10.0, 20.0, 30.0])
    share = Sequences(full.ids_T[1:4], full.count, lambda sums_S: sums_S + elsewhere)
    assert share.sum(torch.ones(3)).tolist() == [11.0, 20.0, 32.0]
