"""Policy and value losses against loops, finite differences and the objectives of the papers."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.config.policy import Aggregation
from megarl.functional.losses import Denominators, aggregate, clipped_policy_loss, decoupled_policy_loss, value_loss
from tests.functional.packs import LOSSES, POLICY_LOSSES, Pack, gradient, iter_sequences, make_pack, numerical_gradient

MODES: list[Aggregation] = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LENGTH_NORM = 7


def aggregate_by_loop(pack: Pack, mode: Aggregation) -> float:
    rows = [values[mask] for mask, values in iter_sequences(pack, pack.values_T)]
    match mode:
        case "token-mean":
            return float(np.concatenate(rows).mean())
        case "seq-mean-token-mean":
            return sum(row.mean() for row in rows if len(row)) / len(rows)
        case _:
            return sum(row.sum() for row in rows) / len(rows) / (LENGTH_NORM if mode.endswith("norm") else 1)


@pytest.mark.parametrize("mode", MODES)
def test_aggregates_of_all_packs_sum_to_the_mean(mode: Aggregation) -> None:
    """Values outside the mask may be infinite."""
    pack = make_pack(1)
    count = Denominators(num_tokens=int(pack.mask_T.sum()), num_sequences=pack.sequences.count)

    def total(part: Pack) -> float:
        values_T = torch.where(part.mask_T, part.values_T, torch.inf)
        counts_T = part.sequences.spread(part.sequences.sum(part.mask_T.double())).clamp(min=1)
        return float(aggregate(values_T, part.mask_T, counts_T, mode=mode, denominators=count, length_norm=LENGTH_NORM))

    want = pytest.approx(aggregate_by_loop(pack, mode), rel=1e-10)
    assert total(pack) == want
    assert sum(map(total, pack.split())) == want


def clip_by_formula(a: float, ratio: float, low: float, high: float) -> tuple[float, bool]:
    bounded = min(max(ratio, low), high)
    return max(-a * ratio, -a * bounded), -a * bounded > -a * ratio


def policy_by_loop(name: str, pack: Pack) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return loss, ratio and clip flag of each token from the formulas of the papers; 0 outside the mask."""
    columns = []
    tensors = (pack.logprobs_T, pack.old_logprobs_T, pack.behave_logprobs_T, pack.advantages_T)
    for mask, new, old, behave, advantages in iter_sequences(pack, *tensors):
        mean = (new - old)[mask].mean() if mask.any() else 0.0
        clipped_logs = [min(d, 0.3) if a > 0 else max(d, -0.4) for d, a in zip(new - old, advantages, strict=True)]
        geometric = math.exp(np.mean(np.array(clipped_logs)[mask])) if mask.any() else 1.0
        for t in np.arange(len(mask)):
            a, ratio = advantages[t], math.exp(new[t] - old[t])
            match name:
                case "clipped" | "dual-clipped" | "decoupled":
                    loss, is_clipped = clip_by_formula(a, ratio, 0.8, 1.28)
                    loss = min(loss, -1.5 * a) if a < 0 and name != "clipped" else loss
                    loss *= min(math.exp(old[t] - behave[t]), 1.3) if name == "decoupled" else 1.0
                case "gspo":
                    ratio = math.exp(mean)
                    loss, is_clipped = clip_by_formula(a, ratio, 0.9, 1.15)
                case "cispo":
                    loss, is_clipped = -min(ratio, 1.5) * a * new[t], ratio > 1.5
                case "gmpo":
                    loss, is_clipped, ratio = -a * geometric, clipped_logs[t] != new[t] - old[t], math.exp(mean)
            columns.append((loss, ratio, is_clipped) if mask[t] else (0.0, 0.0, False))
    loss, ratio, is_clipped = zip(*columns, strict=True)
    return np.array(loss), np.array(ratio), np.array(is_clipped)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_matches_a_loop(name: str) -> None:
    clipped, kept = 0, 0
    for seed in range(5):
        pack = make_pack(seed)
        got = POLICY_LOSSES[name](pack)
        loss, ratio, is_clipped = policy_by_loop(name, pack)
        mask = pack.mask_T.numpy()
        np.testing.assert_allclose(got.loss_T.numpy()[mask], loss[mask], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(got.ratio_T.numpy()[mask], ratio[mask], rtol=1e-9)
        assert got.clipped_T.numpy()[mask].tolist() == is_clipped[mask].tolist()
        clipped, kept = clipped + int(is_clipped[mask].sum()), kept + int((~is_clipped)[mask].sum())
    assert clipped > 5
    assert kept > 5


@pytest.mark.parametrize("name", ["dual-clipped", "decoupled", "clipped"])
def test_tokens_of_the_dual_clip_are_told_apart(name: str) -> None:
    """They are those with a negative advantage whose ratio is above the dual clip; the ratio's bounds spare them."""
    found = 0
    for seed in range(5):
        pack = make_pack(seed)
        got = POLICY_LOSSES[name](pack)
        if name == "clipped":
            assert got.dual_clipped_T is None
            continue
        want_T = (pack.advantages_T < 0) & ((pack.logprobs_T - pack.old_logprobs_T).exp() > 1.5)
        assert torch.equal(got.dual_clipped_T, want_T)
        assert not (got.dual_clipped_T & got.clipped_T).any()
        found += int((want_T & pack.mask_T).sum())
    assert found > 5 or name == "clipped"


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_extreme_ratios_are_finite(name: str) -> None:
    pack = make_pack()
    for gap in (-1e4, 1e4):
        assert LOSSES[name](pack.with_logprobs(pack.logprobs_T + gap)).isfinite().all()


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_sequence_losses_ignore_values_outside_the_mask(name: str) -> None:
    pack = make_pack()
    corrupted = replace(pack, logprobs_T=torch.where(pack.mask_T, pack.logprobs_T, -torch.inf))
    got, want = POLICY_LOSSES[name](corrupted), POLICY_LOSSES[name](pack)
    assert torch.equal(got.loss_T[pack.mask_T], want.loss_T[pack.mask_T])

    def total(logprobs_T: Tensor) -> Tensor:
        return POLICY_LOSSES[name](corrupted.with_logprobs(logprobs_T)).loss_T[pack.mask_T].sum()

    assert gradient(total, corrupted.logprobs_T).isfinite().all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_sequence_losses_have_value_and_gradient_of_the_papers_objective(name: str, seed: int) -> None:
    """GSPO: mean over sequences of min(s A, clip(s) A), with s differentiable in all its tokens (equation 5).

    GMPO: (product of clipped r)^(1 / |o|), r clipped on the side where A would gain.
    """
    pack = make_pack(seed)
    pack = replace(pack, advantages_T=pack.sequences.spread(pack.advantages_T[pack.cu_seqlens_S[:-1].long()]))

    def objective(logprobs_T: Tensor) -> Tensor:
        total = torch.zeros(())
        for start, end in pack.bounds():
            mask, a = pack.mask_T[start:end], pack.advantages_T[start]
            if not mask.any():
                continue
            r = (logprobs_T - pack.old_logprobs_T)[start:end][mask].exp()
            if name == "gspo":
                s = r.log().mean().exp()
                total = total - torch.minimum(s * a, s.clamp(0.9, 1.15) * a)
            else:
                bounded = r.clamp(math.exp(-0.4), math.exp(0.3))
                product = (torch.minimum(r, bounded) if a > 0 else torch.maximum(r, bounded)).prod()
                total = total - a * product ** (1 / int(mask.sum()))
        return total / len(pack.bounds())

    def ours(logprobs_T: Tensor) -> Tensor:
        return pack.sequences.mean(LOSSES[name](pack.with_logprobs(logprobs_T)), pack.mask_T).mean()

    assert float(ours(pack.logprobs_T)) == pytest.approx(float(objective(pack.logprobs_T)), rel=1e-10)
    want = numerical_gradient(objective, pack.logprobs_T)
    assert want.abs().max() > 0.01
    assert torch.allclose(gradient(ours, pack.logprobs_T), want, atol=1e-8)


def test_cispo_keeps_a_gradient_where_it_clips() -> None:
    """d loss / d log pi = -min(r, 1 + clip_high) A: the ratio itself is a constant."""
    pack = make_pack(spread=2)
    ratios = (pack.logprobs_T - pack.old_logprobs_T).exp().clamp(max=1.5)
    got = gradient(lambda logprobs_T: LOSSES["cispo"](pack.with_logprobs(logprobs_T)).sum(), pack.logprobs_T)
    assert torch.allclose(got, -ratios * pack.advantages_T, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in {"gspo", "cispo"}])
def test_gradients_match_finite_differences(name: str) -> None:
    pack = make_pack(3)

    def total(logprobs_T: Tensor) -> Tensor:
        weights = torch.linspace(0.5, 1.5, len(logprobs_T), dtype=torch.double) * pack.mask_T
        return (LOSSES[name](pack.with_logprobs(logprobs_T)) * weights).sum()

    want = numerical_gradient(total, pack.logprobs_T)
    assert want.abs().max() > 0.01
    assert torch.allclose(gradient(total, pack.logprobs_T), want, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.double])
def test_losses_keep_the_dtype_of_their_inputs(name: str, dtype: torch.dtype) -> None:
    pack = make_pack()
    tensors = {f.name: getattr(pack, f.name) for f in fields(pack)}
    floats = {k: v.to(dtype) for k, v in tensors.items() if isinstance(v, Tensor) and v.is_floating_point()}
    assert LOSSES[name](replace(pack, **floats)).dtype == dtype


@pytest.mark.parametrize("clip", [None, 0.5])
def test_value_loss_matches_a_loop(clip: float | None) -> None:
    pack = make_pack(1)
    got = value_loss(pack.values_T, pack.old_values_T, pack.rewards_T, clip=clip)
    for t in range(len(pack.values_T)):
        v, old, ret = (float(x[t]) for x in (pack.values_T, pack.old_values_T, pack.rewards_T))
        clipped_value = v if clip is None else min(max(v, old - clip), old + clip)
        assert float(got.loss_T[t]) == pytest.approx(0.5 * max((v - ret) ** 2, (clipped_value - ret) ** 2))
        assert bool(got.clipped_T[t]) == ((clipped_value - ret) ** 2 > (v - ret) ** 2)
    assert bool(got.clipped_T.any()) == (clip is not None)


@pytest.mark.parametrize("cap", [None, 1.3])
def test_the_behavior_weight_is_constant_and_capped(cap: float | None) -> None:
    pack = make_pack()
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    plain = clipped_policy_loss(pack.logprobs_T, pack.old_logprobs_T, pack.advantages_T, **bounds)
    proximal_T = pack.old_logprobs_T.clone().requires_grad_()
    given = (pack.logprobs_T, proximal_T, pack.behave_logprobs_T, pack.advantages_T)
    got = decoupled_policy_loss(*given, behave_cap=cap, **bounds)
    weights_T = (pack.old_logprobs_T - pack.behave_logprobs_T).exp().clamp(max=cap or math.inf)
    assert torch.allclose(got.loss_T.detach(), weights_T * plain.loss_T, rtol=1e-12)
    assert got.weight_T is not None
    assert not got.weight_T.requires_grad
