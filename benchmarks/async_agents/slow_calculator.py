"""The calculator with a latency, as a tool behind a network has one."""

from __future__ import annotations

import asyncio
import math
import random

from megarl.rollout.environments.calculator import Calculator
from megarl.rollout.environments.environment import Step, Task


class SlowCalculator:
    """The calculator, whose results arrive after a log-normal time.

    The times are a function of the episode's seed: runs with the same seed wait equally long for the same episode.
    """

    def __init__(self, *, mean_seconds: float, sigma: float) -> None:
        """Args:
        mean_seconds: mean of the latency of a call.
        sigma: standard deviation of its logarithm.
        """
        self._calculator = Calculator()
        self._location, self._sigma = math.log(mean_seconds) - sigma**2 / 2, sigma
        self._random = random.Random()

    async def reset(self, task: Task) -> None:
        """Begin with the messages of the row."""
        self._calculator.reset(task)
        self._random.seed(task.seed)

    async def step(self, reply: str) -> Step:
        """Return the result of a call after its latency, or the reward of an answer at once."""
        step = self._calculator.step(reply)
        if step.num_calls:
            await asyncio.sleep(self._random.lognormvariate(self._location, self._sigma))
        return step

    async def close(self) -> None:
        """Do nothing: an episode holds no resources."""
