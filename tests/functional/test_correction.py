"""Rollout correction weights against a loop."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.functional.losses import CorrectionKind, CorrectionOutput, rollout_correction
from tests.functional.packs import Pack, iter_sequences, make_pack

BOUNDS: dict[CorrectionKind, tuple[float, float]] = {
    "token_tis": (0.5, 1.2),
    "sequence_tis": (0.5, 1.2),
    "icepop": (0.7, 1.2),
    "geometric_mask": (0.9, 1.3),
}


def corrected(pack: Pack, kind: CorrectionKind, new_T: Tensor, rollout_T: Tensor) -> CorrectionOutput:
    low, high = BOUNDS[kind]
    return rollout_correction(new_T, rollout_T, pack.mask_T, pack.sequences, kind=kind, low=low, high=high)


def by_loop(pack: Pack, kind: CorrectionKind) -> tuple[list[float], list[bool]]:
    low, high = BOUNDS[kind]
    weights, keep = [], []
    for mask, old, rollout in iter_sequences(pack, pack.old_logprobs_T, pack.behave_logprobs_T):
        logs = (old - rollout)[mask]
        for t in range(len(mask)):
            w = math.exp(old[t] - rollout[t])
            match kind:
                case "token_tis":
                    weight, kept = min(w, high), True
                case "sequence_tis":
                    weight, kept = min(math.exp(logs.sum()), high), True
                case "icepop":
                    weight, kept = w, low <= w <= high
                case "geometric_mask":
                    weight, kept = 1.0, mask.any() and low <= math.exp(logs.mean()) <= high
            kept = bool(kept and mask[t])
            weights.append(weight if kept else 0.0)
            keep.append(kept)
    return weights, keep


@pytest.mark.parametrize("kind", BOUNDS)
def test_weights_match_a_loop(kind: CorrectionKind) -> None:
    kept = counted = 0
    for seed in range(5):
        pack = make_pack(seed, spread=0.3)
        got = corrected(pack, kind, pack.old_logprobs_T, pack.behave_logprobs_T)
        weights, keep = by_loop(pack, kind)
        np.testing.assert_allclose(got.weights_T.numpy(), weights, rtol=1e-12)
        assert got.keep_T.tolist() == keep
        kept, counted = kept + sum(keep), counted + int(pack.mask_T.sum())
    assert kept == counted if kind.endswith("tis") else 0 < kept < counted


@pytest.mark.parametrize("kind", BOUNDS)
def test_weights_are_detached_finite_and_zero_outside_the_mask(kind: CorrectionKind) -> None:
    pack = make_pack()
    new_T, rollout_T = (torch.where(pack.mask_T, pack.old_logprobs_T, x).float() for x in (torch.nan, -torch.inf))
    got = corrected(pack, kind, new_T.requires_grad_(), rollout_T)
    assert not got.weights_T.requires_grad
    assert got.weights_T.dtype == torch.float32
    # without a mismatch all weights are 1
    assert torch.equal(got.keep_T, pack.mask_T)
    assert torch.equal(got.weights_T, pack.mask_T.float())
    for gap in (-1e4, 1e4):
        extreme = corrected(pack, kind, pack.old_logprobs_T, pack.old_logprobs_T + gap)
        assert extreme.weights_T.isfinite().all()
        assert kind.endswith("tis") or not extreme.keep_T.any()
