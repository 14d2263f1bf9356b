"""The default agent: one completion of the prompt."""

from __future__ import annotations

from megarl.batch.trajectory import Trajectory
from megarl.rollout.agents.episode import Episode


async def single_turn(episode: Episode) -> Trajectory:
    """Sample one completion and return the prompt tokens followed by the sampled ones."""
    await episode.generate()
    return episode.trajectory()
