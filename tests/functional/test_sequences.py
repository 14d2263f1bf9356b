"""Sums, means and spreading over the sequences of a pack."""

from __future__ import annotations

import torch

from megarl.functional.sequences import Sequences

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
