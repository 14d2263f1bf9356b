"""What a rollout worker needs of rewards."""

from __future__ import annotations

from typing import Protocol

from megarl.batch.trajectory import Prompt, Trajectory


class Scorer(Protocol):
    """Values finished trajectories."""

    async def score(self, trajectory: Trajectory, prompt: Prompt) -> tuple[dict[str, float], float]:
        """Reward term -> value before weighting, and the weighted sum.

        Raises:
            RewardError: a term raised, timed out or returned no finite number.
        """
        ...
