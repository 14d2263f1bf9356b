"""An environment for runs of random models: answers each reply, rewards turns, and fails in some episodes."""

import asyncio
from pathlib import Path

from megarl.rollout.environments.environment import Step, Task

HINT = "Once more."


class Talking:
    """Ends after a random number of turns, at most four, and fails at the first step of every eighth seed.

    Args:
        metrics: the metrics of the run, which get a row after each step and its push of weights.
        pause: position among all prompts of the one whose episodes wait for the first row between their turns.
    """

    def __init__(self, metrics: str, pause: int) -> None:
        self._metrics, self._pause = Path(metrics), pause
        self._turns_left, self._fails, self._waits = 0, False, False

    async def reset(self, task: Task) -> None:
        self._turns_left, self._fails = 1 + task.seed % 4, task.seed % 8 == 5
        seen = task.shared.setdefault("prompts", [])
        if task.prompt.row not in seen:
            seen.append(task.prompt.row)
        self._waits = seen.index(task.prompt.row) == self._pause

    async def step(self, reply: str) -> Step:
        if self._fails:
            raise ConnectionError("no answer")
        while self._waits and not (self._metrics.exists() and self._metrics.stat().st_size):
            await asyncio.sleep(0.05)
        self._turns_left -= 1
        reward = float("1" in reply)
        if not self._turns_left:
            return Step(reward=reward, done=True)
        return Step(messages=[{"role": "user", "content": HINT}], reward=reward)

    async def close(self) -> None:
        """Do nothing: the environment holds no resources."""
