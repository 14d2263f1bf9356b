"""Filters, PF-PPO resampling and the overlong penalty."""

import numpy as np
import pytest
import torch

from megarl.functional.filters import (
    WEIGHT_FLOOR,
    FilterKind,
    keep_informative_groups,
    overlong_penalty,
    pf_ppo_resample,
    pf_ppo_weights,
)

KINDS: list[FilterKind] = ["pow", "max_min", "max_random"]


def test_overlong_penalty_grows_linearly_in_the_buffer() -> None:
    lengths = torch.tensor([0, 16384, 16385, 18432, 20480])
    got = overlong_penalty(lengths, max_length=20480, buffer=4096, factor=1.0)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([0, 0, -1 / 4096, -0.5, -1])
    assert overlong_penalty(lengths, max_length=20480, buffer=4096, factor=0.4)[3].item() == pytest.approx(-0.2)


def test_informative_groups_of_a_random_batch() -> None:
    rng = np.random.default_rng(0)
    scores, groups = rng.integers(0, 2, 300), rng.integers(0, 100, 300)
    want = [len(set(scores[groups == g])) > 1 for g in groups]
    got = keep_informative_groups(torch.tensor(scores * 0.1 - 1), torch.tensor(groups))
    assert got.dtype == torch.bool
    assert got.tolist() == want
    assert 0 < sum(want) < 300


@pytest.mark.parametrize("kind", KINDS)
def test_pf_ppo_weights_of_a_random_batch(kind: FilterKind) -> None:
    """The sign and scale of rewards do not count; one group has equal ones."""
    rng = np.random.default_rng(1)
    rewards, groups = 9 * rng.normal(size=40) - 5, rng.permutation(np.repeat([4, 9, 1, 30], [5, 12, 20, 3]))
    rewards[groups == 30] = -3.0
    want = []
    for reward, group in zip(rewards, groups, strict=True):
        low, high = min(rewards[groups == group]), max(rewards[groups == group])
        match kind:
            case "pow":
                want.append(((reward - low) / ((high - low) or 1.0)) ** 2)
            case "max_min":
                want.append(1.0 if reward in (low, high) else 0.0)
            case "max_random":
                want.append(0.4 if reward == high else 0.1)
    got = pf_ppo_weights(torch.tensor(rewards), torch.tensor(groups), kind=kind)
    np.testing.assert_allclose(got.numpy(), np.array(want) + WEIGHT_FLOOR, rtol=1e-9)


def test_completions_are_drawn_from_their_own_group_by_weight() -> None:
    weights = torch.tensor([0.4, 0.1, 0.1, 1.0, 0.0]).repeat(400) + WEIGHT_FLOOR
    place = torch.arange(2000)
    groups = torch.tensor([7, 7, 7, 2, 2]).repeat(400)
    got = pf_ppo_resample(weights, groups, generator=torch.Generator().manual_seed(0))
    assert got.dtype == torch.int64
    assert torch.equal(groups[got], groups), "completions must be resampled from their own group"
    share = (place % 5)[got].bincount(minlength=5) / 2000
    np.testing.assert_allclose(share.numpy(), [0.4, 0.1, 0.1, 0.4, 0.0], atol=0.03)
    again = pf_ppo_resample(weights, groups, generator=torch.Generator().manual_seed(0))
    other = pf_ppo_resample(weights, groups, generator=torch.Generator().manual_seed(1))
    assert torch.equal(got, again)
    assert not torch.equal(got, other)
