"""Rewards for a control: those of the environment, shuffled within each group."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from megarl import Trajectory


def shuffled(trajectories: Sequence[Trajectory], texts: Sequence[str], row: Mapping[str, str]) -> list[float]:
    """Return the environment's rewards of a group in an order that depends on its texts only by chance."""
    rewards = [float(sum(trajectory.turn_rewards)) for trajectory in trajectories]
    random.Random(repr(texts)).shuffle(rewards)
    return rewards
