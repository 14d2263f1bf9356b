"""Policy and value losses against loops, finite differences and the objectives of the papers."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.config.algorithms.policy import Aggregation
from megarl.functional.losses import Denominators, aggregate, clipped_policy_loss, decoupled_policy_loss, value_loss
from tests.functional.loss_cases import LOSSES, POLICY_LOSSES, cispo, gmpo, gspo
from tests.functional.packs import Pack, gradient, iter_sequences, make_pack, numerical_gradient

LENGTHS = [3, 1, 5, 4]
MODES: list[Aggregation] = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LENGTH_NORM = 7


def loss_of(advantage: float, ratio: float, dual_clip: float | None = None) -> float:
    loss = clipped_policy_loss(
        torch.tensor([math.log(ratio)]),
        torch.zeros(1),
        torch.tensor([advantage]),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
    )
    return float(loss.loss_T)


@pytest.mark.parametrize(
    ("advantage", "ratio", "dual_clip", "want"),
    [
        (1.0, 1.0, None, -1.0),
        (1.0, 1.5, None, -1.28),  # no more gain above 1 + clip_high
        (1.0, 0.5, None, -0.5),
        (-1.0, 0.5, None, 0.8),  # no more gain below 1 - clip_low
        (-1.0, 4.0, None, 4.0),
        (-1.0, 4.0, 3.0, 3.0),
        (-1.0, 2.0, 3.0, 2.0),
        (1.0, 4.0, 3.0, -1.28),  # the dual clip applies to negative advantages only
    ],
)
def test_golden_values(advantage: float, ratio: float, dual_clip: float | None, want: float) -> None:
    assert loss_of(advantage, ratio, dual_clip) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_clipped_policy_loss_matches_a_loop(dual_clip: float | None) -> None:
    rng = np.random.default_rng(0)
    new, old, advantages = rng.normal(size=(3, 200)).astype(np.float32)
    got = clipped_policy_loss(
        torch.tensor(new),
        torch.tensor(old),
        torch.tensor(advantages),
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=dual_clip,
    )
    for i in range(200):
        ratio, a = math.exp(new[i] - old[i]), float(advantages[i])
        clipped = min(max(ratio, 0.9), 1.3)
        want = max(-a * ratio, -a * clipped)
        if dual_clip is not None and a < 0:
            want = min(want, -dual_clip * a)
        assert float(got.loss_T[i]) == pytest.approx(want, rel=1e-4, abs=1e-6)
        assert float(got.ratio_T[i]) == pytest.approx(ratio, rel=1e-4)
        assert bool(got.clipped_T[i]) == (-a * clipped > -a * ratio)


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    logprobs = torch.full((3,), -2.0, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    loss = clipped_policy_loss(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    loss.loss_T.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx((-advantages).tolist())


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = torch.tensor([0.5, -0.5], requires_grad=True)
    loss = clipped_policy_loss(logprobs, torch.zeros(2), torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    loss.loss_T.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_the_loss_of_an_extreme_ratio_is_finite() -> None:
    loss = clipped_policy_loss(
        torch.tensor([0.0]), torch.tensor([-1e4]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2
    )
    assert torch.isfinite(loss.loss_T).all()


def make_batch() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return values and masks by sequence; the second sequence is fully masked."""
    rng = np.random.default_rng(1)
    values = [rng.normal(size=n).astype(np.float32) for n in LENGTHS]
    masks = [rng.random(n) < 0.6 for n in LENGTHS]
    masks[0][:] = True
    masks[1][:] = False
    return values, masks


def by_loop(values: list[np.ndarray], masks: list[np.ndarray], mode: Aggregation) -> float:
    sums = [float(v[m].sum()) for v, m in zip(values, masks, strict=True)]
    counts = [int(m.sum()) for m in masks]
    match mode:
        case "token-mean":
            return sum(sums) / sum(counts)
        case "seq-mean-token-sum":
            return sum(sums) / len(sums)
        case "seq-mean-token-mean":
            return sum(s / c for s, c in zip(sums, counts, strict=True) if c) / len(sums)
        case "seq-mean-token-sum-norm":
            return sum(sums) / len(sums) / LENGTH_NORM


def packed(values: list[np.ndarray], masks: list[np.ndarray]) -> tuple[Tensor, Tensor, Tensor]:
    counts = [np.full(len(m), max(1, m.sum()), np.float32) for m in masks]
    return (
        torch.tensor(np.concatenate(values)),
        torch.tensor(np.concatenate(masks)),
        torch.tensor(np.concatenate(counts)),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("split", [(4,), (1, 3), (2, 1, 1)])
def test_aggregates_of_all_packs_sum_to_the_mean(mode: Aggregation, split: tuple[int, ...]) -> None:
    values, masks = make_batch()
    count = Denominators(num_tokens=int(sum(m.sum() for m in masks)), num_sequences=len(values))
    total, start = 0.0, 0
    for size in split:
        v, m, counts = packed(values[start : start + size], masks[start : start + size])
        total += float(aggregate(v, m, counts, mode=mode, denominators=count, length_norm=LENGTH_NORM))
        start += size
    assert total == pytest.approx(by_loop(values, masks, mode), rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_ignores_masked_infinite_values(mode: Aggregation) -> None:
    values, masks = make_batch()
    corrupted = [np.where(m, v, np.inf).astype(np.float32) for v, m in zip(values, masks, strict=True)]
    count = Denominators(num_tokens=10, num_sequences=4)
    got = [
        float(aggregate(*packed(v, masks), mode=mode, denominators=count, length_norm=LENGTH_NORM))
        for v in (values, corrupted)
    ]
    assert got[0] == got[1]


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
                case "clipped" | "decoupled":
                    bounded = min(max(ratio, 0.8), 1.28)
                    loss, is_clipped = max(-a * ratio, -a * bounded), -a * bounded > -a * ratio
                    loss = min(loss, -1.5 * a) if a < 0 else loss
                    loss *= min(math.exp(old[t] - behave[t]), 1.3) if name == "decoupled" else 1.0
                case "gspo":
                    ratio = math.exp(mean)
                    bounded = min(max(ratio, 0.9), 1.15)
                    loss, is_clipped = max(-a * ratio, -a * bounded), -a * bounded > -a * ratio
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


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_sequence_losses_ignore_values_outside_the_mask(name: str) -> None:
    pack = make_pack()
    corrupted = replace(pack, logprobs_T=torch.where(pack.mask_T, pack.logprobs_T, -torch.inf))
    got, want = POLICY_LOSSES[name](corrupted), POLICY_LOSSES[name](pack)
    assert torch.equal(got.loss_T[pack.mask_T], want.loss_T[pack.mask_T])

    def total(logprobs_T: Tensor) -> Tensor:
        return POLICY_LOSSES[name](corrupted.with_logprobs(logprobs_T)).loss_T[pack.mask_T].sum()

    assert gradient(total, corrupted.logprobs_T).isfinite().all()


def mean_of_sequences(pack: Pack, values_T: Tensor) -> Tensor:
    """Aggregate with `seq-mean-token-mean`."""
    counts_T = pack.sequences.spread(pack.sequences.sum(pack.mask_T.double())).clamp(min=1)
    denominators = Denominators(num_tokens=1, num_sequences=pack.sequences.count)
    return aggregate(values_T, pack.mask_T, counts_T, mode="seq-mean-token-mean", denominators=denominators)


def with_sequence_advantages(pack: Pack) -> Pack:
    first_S = pack.advantages_T[pack.cu_seqlens_S[:-1].long()]
    return replace(pack, advantages_T=pack.sequences.spread(first_S))


@pytest.mark.parametrize("seed", range(3))
def test_gspo_has_the_gradient_of_the_sequence_objective(seed: int) -> None:
    """Equation 5 of the paper: mean over sequences of min(s A, clip(s) A), with s differentiable in all its tokens."""
    pack = with_sequence_advantages(make_pack(seed))

    def objective(logprobs_T: Tensor) -> Tensor:
        total = torch.zeros(())
        for start, end in pack.bounds():
            mask, a = pack.mask_T[start:end], pack.advantages_T[start]
            if mask.any():
                s = (logprobs_T - pack.old_logprobs_T)[start:end][mask].mean().exp()
                total = total - torch.minimum(s * a, s.clamp(0.9, 1.15) * a)
        return total / len(pack.bounds())

    def ours(logprobs_T: Tensor) -> Tensor:
        return mean_of_sequences(pack, gspo(pack.with_logprobs(logprobs_T)).loss_T)

    assert float(ours(pack.logprobs_T)) == pytest.approx(float(objective(pack.logprobs_T)), rel=1e-10)
    want = numerical_gradient(objective, pack.logprobs_T)
    assert want.abs().max() > 0.01
    assert torch.allclose(gradient(ours, pack.logprobs_T), want, atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_gmpo_is_the_geometric_mean_objective(seed: int) -> None:
    """Product form of the paper: (product of clipped r)^(1 / |o|), r clipped on the side where A would gain."""
    pack = with_sequence_advantages(make_pack(seed))

    def objective(logprobs_T: Tensor) -> Tensor:
        total = torch.zeros(())
        for start, end in pack.bounds():
            mask, a = pack.mask_T[start:end], pack.advantages_T[start]
            if mask.any():
                r = (logprobs_T - pack.old_logprobs_T)[start:end][mask].exp()
                bounded = r.clamp(math.exp(-0.4), math.exp(0.3))
                product = (torch.minimum(r, bounded) if a > 0 else torch.maximum(r, bounded)).prod()
                total = total - a * product ** (1 / int(mask.sum()))
        return total / len(pack.bounds())

    def ours(logprobs_T: Tensor) -> Tensor:
        return mean_of_sequences(pack, gmpo(pack.with_logprobs(logprobs_T)).loss_T)

    assert float(ours(pack.logprobs_T)) == pytest.approx(float(objective(pack.logprobs_T)), rel=1e-10)
    want = numerical_gradient(objective, pack.logprobs_T)
    assert want.abs().max() > 0.01
    assert torch.allclose(gradient(ours, pack.logprobs_T), want, atol=1e-8)


def test_cispo_keeps_a_gradient_where_it_clips() -> None:
    """d loss / d log pi = -min(r, 1 + clip_high) A: the ratio itself is a constant."""
    pack = make_pack(spread=2)
    ratios = (pack.logprobs_T - pack.old_logprobs_T).exp().clamp(max=1.5)
    got = gradient(lambda logprobs_T: cispo(pack.with_logprobs(logprobs_T)).loss_T.sum(), pack.logprobs_T)
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


@pytest.mark.parametrize("name", LOSSES)
def test_a_pack_equals_its_sequences_one_by_one(name: str) -> None:
    pack = make_pack(4)
    parts = torch.cat([LOSSES[name](part) for part in pack.split()])
    full = LOSSES[name](pack)
    assert torch.allclose(full[pack.mask_T], parts[pack.mask_T], rtol=1e-12)


@pytest.mark.parametrize(
    ("value", "old", "want", "clipped"),
    [
        (1.0, 1.0, 2.0, False),  # (1 - 3)^2 / 2
        (2.0, 1.0, 1.125, True),  # clipped to 1.5: (1.5 - 3)^2 / 2
        (0.0, 1.0, 4.5, False),  # clipping to 0.5 would lower the loss
    ],
)
def test_value_loss_by_hand(value: float, old: float, want: float, clipped: bool) -> None:
    got = value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([3.0]), clip=0.5)
    assert got.loss_T.tolist() == [want]
    assert got.clipped_T.tolist() == [clipped]
    unclipped = value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([3.0]), clip=None)
    assert unclipped.loss_T.tolist() == [(value - 3) ** 2 / 2]
    assert unclipped.clipped_T.tolist() == [False]


def test_value_loss_matches_a_loop() -> None:
    pack = make_pack(1)
    got = value_loss(pack.values_T, pack.old_values_T, pack.rewards_T, clip=0.5)
    for t in range(len(pack.values_T)):
        v, old, ret = (float(x[t]) for x in (pack.values_T, pack.old_values_T, pack.rewards_T))
        clipped_value = min(max(v, old - 0.5), old + 0.5)
        assert float(got.loss_T[t]) == pytest.approx(0.5 * max((v - ret) ** 2, (clipped_value - ret) ** 2))
        assert bool(got.clipped_T[t]) == ((clipped_value - ret) ** 2 > (v - ret) ** 2)


def test_the_behavior_weight_is_detached_and_capped() -> None:
    new, behave = torch.zeros(2), torch.tensor([-1.0, 1.0])
    advantages = torch.ones(2)
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    full = decoupled_policy_loss(new, new, behave, advantages, **bounds)
    assert full.loss_T.tolist() == pytest.approx([-math.e, -1 / math.e])
    assert decoupled_policy_loss(new, new, behave, advantages, behave_cap=2.0, **bounds).loss_T.tolist() == (
        pytest.approx([-2.0, -1 / math.e])
    )
    # no gradient flows through the proximal policy in the weight
    leaf = new.clone().requires_grad_()
    decoupled_policy_loss(leaf, leaf.detach(), behave, advantages, **bounds).loss_T.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx([-math.e, -1 / math.e])
