"""The agent interface: an async function that turns a prompt and an engine into one trajectory."""

from __future__ import annotations

from typing import Protocol

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.rollout.engine import GenerationEngine, Sampling


class Agent(Protocol):
    """Runs one episode and returns its trajectory; the rollout worker adds the rewards afterwards."""

    async def __call__(
        self, prompt: Prompt, engine: GenerationEngine, sampling: Sampling, *, request_id: str, group_id: int
    ) -> Trajectory:
        """Run one episode and return its trajectory.

        If the engine is lost, the worker calls the agent once more from the beginning with the same arguments, except
        for the engine: an agent must not keep state between calls.

        Args:
            request_id: unique to this episode; ids of the agent's own requests begin with it.
        """
        ...
