"""The interface through which a rollout worker computes rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megarl.batch.scored_group import ScoredGroup
from megarl.batch.trajectory import Prompt, Trajectory


class Scorer(Protocol):
    """Computes the rewards of finished trajectories."""

    async def score(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> ScoredGroup:
        """Return the trajectories, which are all completions of `prompt`, with their rewards.

        Raises:
            RewardError: a reward could not be computed, and its configuration does not allow to drop the completion.
        """
        ...

    async def close(self) -> None:
        """Release what the rewards hold, such as connections."""
        ...
