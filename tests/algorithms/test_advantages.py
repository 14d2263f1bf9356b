from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.algorithms.advantages import STD_EPSILON, GroupBaseline, group_advantages

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
def test_one_right_of_four(kind: GroupBaseline, want: list[float]) -> None:
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
def test_unequal_groups_in_any_order_are_what_a_loop_makes_of_them(kind: GroupBaseline) -> None:
    rng = np.random.default_rng(3)
    groups = rng.permutation(np.repeat([7, 2, 11, 40], [2, 5, 3, 8]))
    rewards = rng.normal(size=len(groups)) * 10 + 100
    got = group_advantages(torch.tensor(rewards), torch.tensor(groups), kind=kind)
    assert got.tolist() == pytest.approx(by_loop(rewards, groups, kind), rel=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 1 / 3])
def test_equal_rewards_teach_nothing(kind: GroupBaseline, reward: float) -> None:
    got = group_advantages(torch.full((4,), reward), SAME_GROUP, kind=kind)
    assert got.tolist() == [0.0] * 4


def test_a_group_of_one_has_no_baseline() -> None:
    with pytest.raises(ValueError, match="at least 2 completions per group, got 1"):
        group_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), kind="rloo")
