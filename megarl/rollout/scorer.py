"""The interface through which a rollout worker computes rewards."""

from __future__ import annotations

from typing import Protocol

from megarl.batch.trajectory import Prompt, Trajectory


class Scorer(Protocol):
    """Computes the rewards of finished trajectories."""

    async def score(self, trajectory: Trajectory, prompt: Prompt) -> tuple[dict[str, float], float]:
        """Return the unweighted value of each reward term by name, and their weighted sum.

        Raises:
            RewardError: a term raised, timed out or returned something other than a finite number.
        """
        ...
