"""What an agent is: an async function from a prompt and an engine to one trajectory."""

from __future__ import annotations

from typing import Protocol

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.rollout.engine import GenerationEngine, Sampling


class Agent(Protocol):
    """Runs one episode. Rewards are filled in afterwards."""

    async def __call__(
        self, prompt: Prompt, engine: GenerationEngine, sampling: Sampling, *, request_id: str, group_id: int
    ) -> Trajectory:
        """The episode.

        Args:
            request_id: unique to this episode; ids of the agent's own requests begin with it.
        """
        ...
