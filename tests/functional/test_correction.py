"""Rollout correction weights against a loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megarl.functional.correction import CorrectionKind, CorrectionOutput, rollout_correction
from tests.functional.packs import Pack, iter_sequences, make_pack

BOUNDS: dict[CorrectionKind, tuple[float, float]] = {
    "token_tis": (0.5, 1.2),
    "sequence_tis": (0.5, 1.2),
    "icepop": (0.7, 1.2),
    "geometric_mask": (0.9, 1.3),
}


def corrected(pack: Pack, kind: CorrectionKind) -> CorrectionOutput:
    low, high = BOUNDS[kind]
    return rollout_correction(
        pack.old_logprobs_T, pack.behave_logprobs_T, pack.mask_T, pack.sequences, kind=kind, low=low, high=high
    )


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
        got = corrected(pack, kind)
        weights, keep = by_loop(pack, kind)
        np.testing.assert_allclose(got.weights_T.numpy(), weights, rtol=1e-12)
        assert got.keep_T.tolist() == keep
        kept, counted = kept + sum(keep), counted + int(pack.mask_T.sum())
    assert kept == counted if kind.endswith("tis") else 0 < kept < counted


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_pack_equals_its_sequences_one_by_one(kind: CorrectionKind) -> None:
    pack = make_pack(8, spread=0.3)
    parts = [corrected(part, kind) for part in pack.split()]
    full = corrected(pack, kind)
    assert torch.allclose(torch.cat([part.weights_T for part in parts]), full.weights_T, rtol=1e-12)
    assert torch.equal(torch.cat([part.keep_T for part in parts]), full.keep_T)


@pytest.mark.parametrize("kind", BOUNDS)
def test_weights_are_detached_and_zero_outside_the_mask(kind: CorrectionKind) -> None:
    pack = make_pack()
    low, high = BOUNDS[kind]
    got = rollout_correction(
        torch.where(pack.mask_T, pack.old_logprobs_T, torch.nan).float().requires_grad_(),
        torch.where(pack.mask_T, pack.old_logprobs_T, -torch.inf).float(),
        pack.mask_T,
        pack.sequences,
        kind=kind,
        low=low,
        high=high,
    )
    assert not got.weights_T.requires_grad
    assert got.weights_T.dtype == torch.float32
    # without a mismatch all weights are 1
    assert torch.equal(got.keep_T, pack.mask_T)
    assert torch.equal(got.weights_T, pack.mask_T.float())


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_weights_of_an_extreme_mismatch_are_finite(kind: CorrectionKind, gap: float) -> None:
    pack = make_pack()
    low, high = BOUNDS[kind]
    got = rollout_correction(
        pack.old_logprobs_T, pack.old_logprobs_T + gap, pack.mask_T, pack.sequences, kind=kind, low=low, high=high
    )
    assert got.weights_T.isfinite().all()
    assert kind.endswith("tis") or not got.keep_T.any()
