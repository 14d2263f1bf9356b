"""Advantages per turn against loops over episodes, and against advantages per episode where these agree."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Literal

import numpy as np
import pytest
import torch

from megarl.functional import group_advantages, turn_advantages, turn_of_tokens, turn_returns

Kind = Literal["grpo", "dr_grpo", "rloo"]
KINDS: tuple[Kind, ...] = ("grpo", "dr_grpo", "rloo")


def episodes_of(seed: int, *, max_turns: int) -> tuple[list[list[float]], list[int]]:
    """Return the rewards of the turns of 12 episodes, and the group of each."""
    rng = np.random.default_rng(seed)
    turns = [rng.normal(size=int(rng.integers(1, max_turns + 1))).tolist() for _ in range(12)]
    return turns, [0, 0, 0, 1, 1, 2, 2, 2, 2, 7, 7, 7]


def flat(turns: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.tensor([reward for of in turns for reward in of], dtype=torch.double)
    return rewards, torch.tensor([n for n, of in enumerate(turns) for _ in of])


def expected(turns: list[list[float]], groups: list[int], kind: Kind) -> list[float]:
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
            if kind == "rloo":
                found.append(value - fmean(total for j, total in others.items() if j != i))
            elif kind == "dr_grpo":
                found.append(value - fmean(others.values()))
            else:
                found.append((value - fmean(others.values())) / (stdev(others.values()) + 1e-6))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_turn_advantages_match_a_loop_over_episodes(seed: int, kind: Kind) -> None:
    turns, groups = episodes_of(seed, max_turns=5)
    got = turn_advantages(*flat(turns), torch.tensor(groups), kind=kind)
    np.testing.assert_allclose(got.numpy(), expected(turns, groups, kind), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_with_one_turn_each_they_are_the_advantages_of_episodes(kind: Kind) -> None:
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
