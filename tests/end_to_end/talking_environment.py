"""An environment for runs of random models: answers each reply, rewards turns, and fails in some episodes."""

from __future__ import annotations

from megarl.rollout.environments.environment import Step, Task

HINT = "Once more."


class Talking:
    """Ends after a random number of turns, at most four, and fails at the first step of every eighth seed."""

    def __init__(self) -> None:
        self._turns_left, self._fails = 0, False

    async def reset(self, task: Task) -> None:
        self._turns_left, self._fails = 1 + task.seed % 4, task.seed % 8 == 5

    async def step(self, reply: str) -> Step:
        if self._fails:
            raise ConnectionError("no answer")
        self._turns_left -= 1
        reward = float("1" in reply)
        if not self._turns_left:
            return Step(reward=reward, done=True)
        return Step(messages=[{"role": "user", "content": HINT}], reward=reward)

    async def close(self) -> None:
        """Do nothing: the environment holds no resources."""
