"""Problems that are solved with a calculator: the policy writes calls, reads results, and gives an answer."""

from __future__ import annotations

import re

from megarl.rollout.environments.environment import Step, Task
from megarl.rollout.environments.expressions import ExpressionError, compute

CALL = re.compile(r"calc\(((?:[^()]|\([^()]*\))*)\)")
"""A call of the calculator; parentheses in it may be nested once."""

ANSWER = re.compile(r"####\s*(-?\d+)\s*$")
"""The answer, at the end of a reply."""


class Calculator:
    """Computes the first `calc(...)` of a reply, until a reply has none; that one needs to end in `#### <answer>`.

    The reward is 1 at the end of an episode whose answer is that of the row (`data.fields.answer`), else 0. A call that
    cannot be computed gets the reason as its result.
    """

    def __init__(self, *, role: str = "tool") -> None:
        """`role`: role of the messages with results."""
        self._role = role
        self._answer = ""

    def reset(self, task: Task) -> None:
        """Begin with the messages of the row.

        Raises:
            ValueError: the row has no answer.
        """
        if task.prompt.answer is None:
            raise ValueError(f"{task.prompt.prompt_id} has no answer (data.fields.answer)")
        self._answer = task.prompt.answer.strip()

    def step(self, reply: str) -> Step:
        """Return the result of a call, or the reward of an answer."""
        call = CALL.search(reply)
        if call is None:
            answer = ANSWER.search(reply)
            return Step(reward=float(answer is not None and answer.group(1) == self._answer), done=True)
        try:
            result = str(compute(call.group(1)))
        except ExpressionError as e:
            result = f"error: {e}"
        return Step(messages=[{"role": self._role, "content": result}], num_calls=1)

    def close(self) -> None:
        """Do nothing: an episode holds no resources."""
