"""A game in text: find a number from hints, with a reward at the end of the game."""

from __future__ import annotations

import re

from megarl.rollout.environments.environment import Step, Task

NUMBER = re.compile(r"-?\d+")


class Guess:
    """Answers each guess with `higher` or `lower`; the number is the row's answer (`data.fields.answer`).

    The reward of the game is 1 if a guess within `max_guesses` is right, and 0 otherwise. It is given at the end: hints
    give none. A reply without a number ends the game.

    Examples:
        >>> from megarl.batch.trajectory import Prompt
        >>> prompt = Prompt(prompt_id="train.jsonl:1", text="What is 6 * 7?", token_ids=(5, 6), row={}, answer="42")
        >>> environment = Guess(max_guesses=2)
        >>> messages = [{"role": "user", "content": prompt.text}]
        >>> environment.reset(Task(prompt=prompt, messages=messages, seed=0, shared={}))
        >>> environment.step("is it 40?").messages
        [{'role': 'user', 'content': 'higher'}]
        >>> environment.step("42").reward
        1.0
    """

    def __init__(self, *, max_guesses: int = 3, role: str = "user") -> None:
        """`role`: role of the messages with hints."""
        if max_guesses < 1:
            raise ValueError(f"max_guesses needs to be at least 1, got {max_guesses}")
        self._guesses_left, self._role = max_guesses, role
        self._number = 0

    def reset(self, task: Task) -> None:
        """Begin with the messages of the row.

        Raises:
            ValueError: the row's answer is no integer.
        """
        answer = task.prompt.answer
        if answer is None or NUMBER.fullmatch(answer.strip()) is None:
            raise ValueError(f"{task.prompt.prompt_id} needs an integer as its answer, got {answer!r}")
        self._number = int(answer)

    def step(self, reply: str) -> Step:
        """Return a hint, or the reward of the game."""
        found = NUMBER.search(reply[:100])
        self._guesses_left -= 1
        if found is None or int(found.group()) == self._number or not self._guesses_left:
            return Step(reward=float(found is not None and int(found.group()) == self._number), done=True)
        hint = "higher" if self._number > int(found.group()) else "lower"
        return Step(messages=[{"role": self._role, "content": hint}])

    def close(self) -> None:
        """Do nothing: a game holds no resources."""
