"""Advantages and returns against loops and hand-computed values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.functional.advantages import (
    STD_EPSILON,
    GroupBaseline,
    discounted_returns,
    gae,
    group_advantages,
    length_adaptive_lambda,
    remax_advantages,
    spread_completions,
    whiten,
)
from tests.functional.packs import LENGTHS, Pack, iter_sequences, make_pack


def reinforce_pp_advantages(
    rewards_T: Tensor, mask_T: Tensor, cu_seqlens_S: Tensor, *, gamma: float, unbiased: bool = False
) -> Tensor:
    """Return what REINFORCE++ trains with (arXiv 2501.03262): discounted returns, whitened over the whole batch."""
    return whiten(discounted_returns(rewards_T, mask_T, cu_seqlens_S, gamma=gamma), mask_T, unbiased=unbiased)


def reinforce_pp_baseline_advantages(
    rewards_N: Tensor, group_ids_N: Tensor, mask_T: Tensor, cu_seqlens_S: Tensor, *, unbiased: bool = False
) -> Tensor:
    """Return what REINFORCE++-baseline trains with: rewards minus the group's mean on every token, whitened."""
    centred_N = group_advantages(rewards_N, group_ids_N, kind="dr_grpo")
    return whiten(spread_completions(centred_N, mask_T, cu_seqlens_S), mask_T, unbiased=unbiased)


ONE_OF_FOUR = torch.tensor([1.0, 0.0, 0.0, 0.0])
SAME_GROUP = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_group_advantages_golden_values(kind: GroupBaseline, want: list[float]) -> None:
    got = group_advantages(ONE_OF_FOUR, SAME_GROUP, kind=kind)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(want, rel=1e-5)


def by_loop(rewards: np.ndarray, groups: np.ndarray, kind: GroupBaseline) -> list[float]:
    out = []
    for i, reward in enumerate(rewards):
        members = rewards[groups == groups[i]]
        others = np.delete(rewards, i)[np.delete(groups, i) == groups[i]]
        match kind:
            case "grpo":
                out.append((reward - members.mean()) / (members.std(ddof=1) + STD_EPSILON))
            case "dr_grpo":
                out.append(reward - members.mean())
            case "rloo":
                out.append(reward - others.mean())
    return out


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_group_advantages_of_unequal_shuffled_groups_match_a_loop(kind: GroupBaseline) -> None:
    rng = np.random.default_rng(3)
    groups = rng.permutation(np.repeat([7, 2, 11, 40], [2, 5, 3, 8]))
    rewards = rng.normal(size=len(groups)) * 10 + 100
    got = group_advantages(torch.tensor(rewards), torch.tensor(groups), kind=kind)
    assert got.tolist() == pytest.approx(by_loop(rewards, groups, kind), rel=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 1 / 3])
def test_equal_rewards_give_zero_advantages(kind: GroupBaseline, reward: float) -> None:
    got = group_advantages(torch.full((4,), reward), SAME_GROUP, kind=kind)
    assert got.tolist() == [0.0] * 4


def test_a_group_of_one_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least 2 completions per group, got 1"):
        group_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), kind="rloo")


GAE_GOLDEN = [
    ([0, 0, 1], [0.5, 0.4, 0.2], [1, 1, 1], [0.432, 0.56, 0.8], [0.932, 0.96, 1.0]),
    ([0, 0, 0, 1], [0.5, 0.9, 0.4, 0.2], [1, 0, 1, 1], [0.432, 0, 0.56, 0.8], [0.932, 0, 0.96, 1.0]),
]


@pytest.mark.parametrize(("rewards", "values", "mask", "advantages", "returns"), GAE_GOLDEN)
def test_gae_golden_values(
    rewards: list[float], values: list[float], mask: list[int], advantages: list[float], returns: list[float]
) -> None:
    got = gae(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(values),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor([0, len(rewards)], dtype=torch.int32),
        gamma=1.0,
        lam=0.95,
    )
    assert got[0].tolist() == pytest.approx(advantages, abs=1e-5)
    assert got[1].tolist() == pytest.approx(returns, abs=1e-5)


def gae_by_loop(pack: Pack, gamma: float, lams: list[float]) -> tuple[list[float], list[float]]:
    advantages, returns = [], []
    for (mask, rewards, values), lam in zip(iter_sequences(pack, pack.rewards_T, pack.values_T), lams, strict=True):
        row, next_value, next_advantage = [(0.0, 0.0)] * len(mask), 0.0, 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                next_advantage = rewards[t] + gamma * next_value - values[t] + gamma * lam * next_advantage
                next_value = values[t]
                row[t] = (next_advantage, next_advantage + next_value)
        advantages += [a for a, _ in row]
        returns += [r for _, r in row]
    return advantages, returns


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 1e-8, 0.95, 1.0, "each"])
def test_gae_matches_a_loop(gamma: float, lam: float | str) -> None:
    pack = make_pack()
    lams = [1.0, 0.3, 0.7, 0.1, 0.0, 0.98] if isinstance(lam, str) else [lam] * len(LENGTHS)
    got = gae(
        pack.rewards_T,
        pack.values_T,
        pack.mask_T,
        pack.cu_seqlens_S,
        gamma=gamma,
        lam=torch.tensor(lams) if isinstance(lam, str) else lam,
    )
    want = gae_by_loop(pack, gamma, torch.tensor(lams).tolist() if isinstance(lam, str) else lams)
    for tensor, column in zip(got, want, strict=True):
        assert tensor.dtype == torch.double
        assert tensor.tolist() == pytest.approx(column, abs=1e-10)


@pytest.mark.parametrize("lam", [0.05, 0.95, 1.0])
def test_gae_of_a_long_sequence_among_many_short_ones(lam: float) -> None:
    rng = np.random.default_rng(5)
    lengths = [*rng.integers(1, 60, 100), 32_768, *rng.integers(1, 60, 100)]
    total = sum(lengths)
    pack = replace(
        make_pack(),
        rewards_T=torch.tensor(rng.normal(size=total)),
        values_T=torch.tensor(rng.normal(size=total)),
        mask_T=torch.tensor(rng.random(total) < 0.8),
        cu_seqlens_S=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
    )
    want = gae_by_loop(pack, 1.0, [lam] * len(lengths))
    for dtype, tolerance in ((torch.double, 1e-9), (torch.float32, 1e-4)):
        got = gae(pack.rewards_T.to(dtype), pack.values_T.to(dtype), pack.mask_T, pack.cu_seqlens_S, gamma=1.0, lam=lam)
        for tensor, column in zip(got, want, strict=True):
            assert tensor.dtype == dtype
            np.testing.assert_allclose(tensor.numpy(), column, rtol=tolerance, atol=tolerance * 100)


def test_sums_over_a_long_sequence_are_exact() -> None:
    total = 32_768
    rewards_T, values_T = torch.full((total,), 0.1), torch.full((total,), 1e3)
    mask_T, cu_seqlens_S = torch.arange(total) % 3 != 1, torch.tensor([0, total], dtype=torch.int32)
    _, returns_T = gae(rewards_T, values_T, mask_T, cu_seqlens_S, gamma=1.0, lam=1.0)
    want = mask_T.double().flip(0).cumsum(0).flip(0) * float(rewards_T[0])
    np.testing.assert_allclose(returns_T.numpy(), (want * mask_T).numpy(), rtol=1e-6)


def test_gae_ignores_values_outside_the_mask() -> None:
    pack = make_pack()
    corrupted = torch.where(pack.mask_T, 0.0, torch.nan)
    got = gae(pack.rewards_T + corrupted, pack.values_T + corrupted, pack.mask_T, pack.cu_seqlens_S, gamma=1.0, lam=0.9)
    want = gae(pack.rewards_T, pack.values_T, pack.mask_T, pack.cu_seqlens_S, gamma=1.0, lam=0.9)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
        assert not a[~pack.mask_T].any()


def test_a_fully_masked_pack_gives_zeros() -> None:
    zeros, empty_mask, cu = torch.zeros(3), torch.zeros(3, dtype=torch.bool), torch.tensor([0, 1, 3], dtype=torch.int32)
    for got in (
        *gae(zeros + 1, zeros + 2, empty_mask, cu, gamma=1.0, lam=1.0),
        *gae(zeros + 1, zeros + 2, empty_mask, cu, gamma=1.0, lam=torch.tensor([0.1, 0.2])),
        discounted_returns(zeros + 1, empty_mask, cu, gamma=1.0),
        reinforce_pp_advantages(zeros + 1, empty_mask, cu, gamma=1.0),
        whiten(zeros + 1, empty_mask),
        remax_advantages(zeros + 1, torch.tensor([1.0, 2.0]), empty_mask, cu),
    ):
        assert got.tolist() == [0.0] * 3


def returns_by_loop(pack: Pack, gamma: float) -> list[float]:
    out = []
    for mask, rewards in iter_sequences(pack, pack.rewards_T):
        indices = np.flatnonzero(mask)
        row = np.zeros(len(mask))
        for i, t in enumerate(indices):
            row[t] = sum(gamma**k * rewards[later] for k, later in enumerate(indices[i:]))
        out += row.tolist()
    return out


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_discounted_returns_and_reinforce_pp(gamma: float) -> None:
    pack = make_pack()
    want = np.array(returns_by_loop(pack, gamma))
    got = discounted_returns(pack.rewards_T, pack.mask_T, pack.cu_seqlens_S, gamma=gamma)
    np.testing.assert_allclose(got.numpy(), want, atol=1e-12)
    inside = want[pack.mask_T.numpy()]
    whitened = reinforce_pp_advantages(pack.rewards_T, pack.mask_T, pack.cu_seqlens_S, gamma=gamma)
    np.testing.assert_allclose(
        whitened[pack.mask_T].numpy(), (inside - inside.mean()) / (inside.std() + 1e-8), atol=1e-10
    )


def test_whitened_values_have_mean_0_and_standard_deviation_1() -> None:
    pack = make_pack()
    got = whiten((pack.values_T * 100 + 1e4).float(), pack.mask_T)
    assert got.dtype == torch.float32
    assert not got[~pack.mask_T].any()
    inside = got[pack.mask_T].double()
    assert float(inside.mean()) == pytest.approx(0, abs=1e-6)
    assert float(inside.std(correction=0)) == pytest.approx(1, rel=1e-5)
    assert whiten(torch.tensor([3.0, 7.0]), torch.tensor([False, True])).tolist() == [0.0, 0.0]


def test_reinforce_pp_baseline_whitens_over_all_tokens() -> None:
    pack = make_pack()
    rewards, groups = np.array([1.0, 0.0, 0.5, 1.0, 0.0]), np.array([3, 3, 1, 1, 3])
    means = [rewards[groups == g].mean() for g in groups]
    # the last sequence of the pack is padding: its tokens are outside the mask
    mask = pack.mask_T.clone()
    mask[pack.cu_seqlens_S[-2] :] = False
    row = np.concatenate([np.full(n, r) for n, r in zip(LENGTHS, [*(rewards - means), 0.0], strict=True)])
    inside = row[mask.numpy()]
    got = reinforce_pp_baseline_advantages(torch.tensor(rewards), torch.tensor(groups), mask, pack.cu_seqlens_S)
    assert got.dtype == torch.float32
    assert not got[~mask].any()
    np.testing.assert_allclose(got[mask].numpy(), (inside - inside.mean()) / inside.std(), atol=1e-5)
    with pytest.raises(AssertionError, match="5 completions"):
        reinforce_pp_baseline_advantages(torch.tensor(rewards), torch.tensor(groups), pack.mask_T, pack.cu_seqlens_S)


def test_remax_subtracts_the_greedy_reward() -> None:
    pack = make_pack()
    baseline = np.arange(len(LENGTHS)) / 10
    want = np.array(returns_by_loop(pack, 1.0)) - np.repeat(baseline, LENGTHS)
    got = remax_advantages(pack.rewards_T, torch.tensor(baseline), pack.mask_T, pack.cu_seqlens_S)
    np.testing.assert_allclose(got.numpy(), np.where(pack.mask_T, want, 0.0), atol=1e-12)
    # one reward at the end, as from a verifier: 1 right, greedy wrong
    rewards, mask = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([False, True, True])
    assert remax_advantages(rewards, torch.tensor([0.25]), mask, torch.tensor([0, 3])).tolist() == [0.0, 0.75, 0.75]


def test_length_adaptive_lambda_grows_with_the_length() -> None:
    got = length_adaptive_lambda(torch.tensor([0, 1, 20, 100, 1000]), alpha=0.05)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.8, 0.98], abs=1e-6)


def test_a_pack_equals_its_sequences_one_by_one() -> None:
    pack = make_pack(7)
    lams = torch.tensor([1.0, 0.3, 0.7, 0.1, 0.0, 0.98])

    def tokens(part: Pack, lams: Tensor, baseline: Tensor) -> Tensor:
        given = (part.mask_T, part.cu_seqlens_S)
        return torch.stack(
            [
                *gae(part.rewards_T, part.values_T, *given, gamma=0.97, lam=lams),
                discounted_returns(part.rewards_T, *given, gamma=0.97),
                remax_advantages(part.rewards_T, baseline, *given),
            ]
        )

    full = tokens(pack, lams, lams.double())
    parts = [tokens(part, lams[s : s + 1], lams[s : s + 1].double()) for s, part in enumerate(pack.split())]
    assert torch.equal(full, torch.cat(parts, 1))


@pytest.mark.parametrize("slab", [1, 7, 12, 1000])
def test_large_packs_are_processed_in_blocks_of_sequences(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.functional.advantages.BLOCK_TOKENS", slab)
    pack = make_pack(6)
    # add two empty sequences, one of them at the end
    cu_seqlens_S = torch.cat([pack.cu_seqlens_S[:2], pack.cu_seqlens_S[1:], pack.cu_seqlens_S[-1:]])
    lams = [1.0, 0.5, 0.3, 0.7, 0.1, 0.0, 0.98, 0.5]
    got = gae(
        pack.rewards_T, pack.values_T, pack.mask_T, cu_seqlens_S, gamma=0.9, lam=torch.tensor(lams, dtype=torch.double)
    )
    want = gae_by_loop(replace(pack, cu_seqlens_S=cu_seqlens_S), 0.9, lams)
    for tensor, column in zip(got, want, strict=True):
        assert tensor.tolist() == pytest.approx(column, abs=1e-12)
    returns = discounted_returns(pack.rewards_T, pack.mask_T, cu_seqlens_S, gamma=0.8)
    assert returns.tolist() == pytest.approx(returns_by_loop(pack, 0.8), abs=1e-12)
