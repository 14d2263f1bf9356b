"""Problems that are solved with Python: the policy writes code, reads its output, and gives an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from megarl.config.reward import SandboxConfig
from megarl.errors import AgentError, ConfigError
from megarl.rollout.environments.calculator import ANSWER
from megarl.rollout.environments.environment import Step, Task, require_answers
from megarl.sandbox.sandbox import Interpreter, Outcome
from megarl.sandbox.session import find_code
from megarl.sandbox.tiers import choose_tier, open_sandbox

KEY = "rollout.env.kwargs.sandbox"

LOST = {
    "timeout": "error: the code took too long; variables are lost",
    "memory": "error: the code used too much memory; variables are lost",
}
"""What the policy reads where a cell has ended its interpreter; other ends have `OTHER_END`."""

OTHER_END = "error: the interpreter has ended; variables are lost"


class PythonInterpreter:
    """Runs the code of a reply in an interpreter of the episode, until a reply has none.

    The code is the last block in backticks labelled as Python, or else the last one without a label.

    That reply needs to end in `#### <answer>`. The reward is 1 at the end of an episode whose answer is that of the row
    (`data.fields.answer`), else 0; the row is not in the sandbox. A sandbox that cannot start fails the episode.

    Examples:
            rollout:
              env:
                path: megarl.rollout.environments:PythonInterpreter
                kwargs: {sandbox: {cpu_seconds: 5}}
    """

    def __init__(self, *, sandbox: Mapping[str, Any] | None = None, role: str = "tool") -> None:
        """Choose the sandbox; it starts with the first code.

        Args:
            sandbox: limits and tier, as in `reward.terms.NAME.sandbox` of the type `code`.
            role: role of the messages with outputs.

        Raises:
            AgentError: the settings are invalid, or no sandbox works on this machine.
        """
        try:
            self._sandbox = open_sandbox(_validated(sandbox), key=KEY)
        except ConfigError as e:
            raise AgentError(str(e)) from e
        self._role = role
        self._answers: list[str] = []
        self._interpreter: Interpreter | None = None

    @staticmethod
    def check_settings(*, sandbox: Mapping[str, Any] | None = None, role: str = "tool") -> None:
        """Choose the sandbox without starting it; arguments as for the class.

        Raises:
            ConfigError: the settings are invalid, or no sandbox works on this machine.
        """
        choose_tier(_validated(sandbox), key=KEY)

    def reset(self, task: Task) -> None:
        """Begin with the messages of the row.

        Raises:
            ValueError: the row has no answer.
        """
        self._answers = [answer.strip() for answer in require_answers(task)]

    def step(self, reply: str) -> Step:
        """Return the output of code, or the reward of an answer.

        Raises:
            SandboxError: the sandbox cannot start or was lost.
        """
        code = find_code(reply)
        if code is None:
            answer = ANSWER.search(reply)
            return Step(reward=float(answer is not None and answer.group(1) in self._answers), done=True)
        if self._interpreter is None:
            self._interpreter = self._sandbox.open_interpreter()
        text = describe_outcome(self._interpreter.run(code))
        return Step(messages=[{"role": self._role, "content": text}], num_calls=1)

    def close(self) -> None:
        """End the interpreter and its sandbox."""
        if self._interpreter is not None:
            self._interpreter.close()
        self._sandbox.close()


def describe_outcome(outcome: Outcome) -> str:
    """Return what the policy reads of a cell: its output, and of an exception the type and message."""
    parts = [outcome.stdout.rstrip("\n")]
    if outcome.status == "error":
        parts.append(outcome.stderr.rstrip("\n").rpartition("\n")[2])
    elif outcome.status != "ok":
        parts.append(LOST.get(outcome.status, OTHER_END))
    return "\n".join(part for part in parts if part) or "(no output)"


def _validated(sandbox: Mapping[str, Any] | None) -> SandboxConfig:
    try:
        return SandboxConfig.model_validate(dict(sandbox or {}))
    except ValidationError as e:
        first = e.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, (KEY, *first['loc'])))}: {first['msg']}") from e
