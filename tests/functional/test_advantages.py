"""Advantages and returns, of tokens and of turns, against loops and hand-computed values."""

from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest
import torch

from megarl.functional import advantages as adv
from megarl.functional import turn_advantages, turn_of_tokens, turn_returns
from megarl.functional.advantages import GroupBaseline, discounted_returns, gae, group_advantages, whiten
from megarl_kernels import segmented_reverse_scan
from tests.errors import expect_error
from tests.functional.packs import LENGTHS, Pack, iter_sequences, make_pack

KINDS: list[GroupBaseline] = ["grpo", "dr_grpo", "rloo"]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_have_no_advantage_and_a_group_needs_two(kind: GroupBaseline) -> None:
    got = group_advantages(torch.full((3,), 1 / 3), torch.zeros(3, dtype=torch.int64), kind=kind)
    assert got.dtype == torch.float32
    assert got.tolist() == [0.0] * 3
    with expect_error(ValueError, "2", "1", "completions", "least"):
        group_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), kind=kind)


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
    given = torch.tensor(lams) if isinstance(lam, str) else lam
    got = gae(pack.rewards_T, pack.values_T, pack.mask_T, pack.cu_seqlens_S, gamma=gamma, lam=given)
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
        whiten(zeros + 1, empty_mask),
        adv.remax_advantages(zeros + 1, torch.tensor([1.0, 2.0]), empty_mask, cu),
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


def test_whitened_values_have_mean_0_and_standard_deviation_1() -> None:
    pack = make_pack()
    got = whiten((pack.values_T * 100 + 1e4).float(), pack.mask_T)
    assert got.dtype == torch.float32
    assert not got[~pack.mask_T].any()
    inside = got[pack.mask_T].double()
    assert float(inside.mean()) == pytest.approx(0, abs=1e-6)
    assert float(inside.std(correction=0)) == pytest.approx(1, rel=1e-5)
    assert whiten(torch.tensor([3.0, 7.0]), torch.tensor([False, True])).tolist() == [0.0, 0.0]


def test_tokens_after_the_last_completion_have_no_value() -> None:
    pack = make_pack()
    with expect_error(AssertionError, "5", "completions"):
        adv.spread_completions(torch.zeros(5), pack.mask_T, pack.cu_seqlens_S)


@pytest.mark.parametrize("slab", [1, 7, 12, 1000])
def test_large_packs_are_processed_in_blocks_of_sequences(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.functional.advantages.BLOCK_TOKENS", slab)
    pack = make_pack(6)
    # add two empty sequences, one of them at the end
    cu_seqlens_S = torch.cat([pack.cu_seqlens_S[:2], pack.cu_seqlens_S[1:], pack.cu_seqlens_S[-1:]])
    lams = torch.tensor([1.0, 0.5, 0.3, 0.7, 0.1, 0.0, 0.98, 0.5], dtype=torch.double)
    got = gae(pack.rewards_T, pack.values_T, pack.mask_T, cu_seqlens_S, gamma=0.9, lam=lams)
    want = gae_by_loop(replace(pack, cu_seqlens_S=cu_seqlens_S), 0.9, lams.tolist())
    for tensor, column in zip(got, want, strict=True):
        assert tensor.tolist() == pytest.approx(column, abs=1e-12)
    returns = discounted_returns(pack.rewards_T, pack.mask_T, cu_seqlens_S, gamma=0.8)
    assert returns.tolist() == pytest.approx(returns_by_loop(pack, 0.8), abs=1e-12)


def episodes_of(seed: int, *, max_turns: int) -> tuple[list[list[float]], list[int]]:
    """Return the rewards of the turns of 12 episodes, and the group of each."""
    rng = np.random.default_rng(seed)
    turns = [rng.normal(size=int(rng.integers(1, max_turns + 1))).tolist() for _ in range(12)]
    return turns, [0, 0, 0, 1, 1, 2, 2, 2, 2, 7, 7, 7]


def flat(turns: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.tensor([reward for of in turns for reward in of], dtype=torch.double)
    return rewards, torch.tensor([n for n, of in enumerate(turns) for _ in of])


def turn_advantages_by_loop(turns: list[list[float]], groups: list[int], kind: GroupBaseline) -> list[float]:
    """Return the advantages by the formula of `turn_advantages`, episode by episode."""
    found = []
    for i, own in enumerate(turns):
        siblings = [j for j, group in enumerate(groups) if group == groups[i]]
        last = max((k for k in range(9) if sum(len(turns[j]) > k for j in siblings) >= 2), default=None)
        for k in range(len(own)):
            if last is None:
                found.append(0.0)
                continue
            at = min(k, last)
            others = {j: sum(turns[j][at:]) for j in siblings if len(turns[j]) > at}
            value = sum(own[k:])
            baseline = fmean(total for j, total in others.items() if kind != "rloo" or j != i)
            found.append((value - baseline) / (stdev(others.values()) + 1e-6 if kind == "grpo" else 1.0))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_turn_advantages_match_a_loop_over_episodes(seed: int, kind: GroupBaseline) -> None:
    turns, groups = episodes_of(seed, max_turns=5)
    got = turn_advantages(*flat(turns), torch.tensor(groups), kind=kind)
    np.testing.assert_allclose(got.numpy(), turn_advantages_by_loop(turns, groups, kind), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_with_one_turn_each_they_are_the_advantages_of_episodes(kind: GroupBaseline) -> None:
    turns, groups = episodes_of(0, max_turns=1)
    rewards, owners = flat(turns)
    got = turn_advantages(rewards, owners, torch.tensor(groups), kind=kind)
    np.testing.assert_allclose(got, group_advantages(rewards, torch.tensor(groups), kind=kind), rtol=1e-6)


def test_a_group_in_which_one_episode_has_turns_gets_no_advantage() -> None:
    got = turn_advantages(torch.tensor([1.0, 2.0]), torch.tensor([1, 1]), torch.tensor([0, 0]), kind="rloo")
    assert got.tolist() == [0.0, 0.0]
    assert not len(turn_advantages(torch.zeros(0), torch.zeros(0).long(), torch.tensor([0, 0]), kind="grpo"))


def test_turns_are_runs_of_sampled_tokens() -> None:
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1], dtype=torch.bool)
    assert turn_of_tokens(mask).tolist() == [-1, 0, 0, -1, 1, -1, -1, 2, 2]


def test_returns_add_up_the_later_turns_of_the_episode() -> None:
    got = turn_returns(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 2, 2]))
    assert got.tolist() == [3.0, 2.0, 12.0, 8.0]


def test_generalized_advantage_estimation_is_one_scan() -> None:
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 40, generator=g).double()
    last = torch.tensor([11, 30, 39])
    following = values.roll(-1).index_fill(0, last, 0.0)
    factors = torch.full((40,), 0.99 * 0.95).double().index_fill(0, last, 0.0)
    advantages = segmented_reverse_scan(rewards + 0.99 * following - values, factors)
    mask, bounds = torch.ones(40, dtype=torch.bool), torch.tensor([0, 12, 31, 40])
    want, _ = gae(rewards, values, mask, bounds, gamma=0.99, lam=0.95)
    torch.testing.assert_close(advantages.float(), want.float(), rtol=1e-4, atol=1e-5)  # gae computes in float32
