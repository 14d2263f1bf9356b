"""The reward term that runs a completion's program on the test cases of its row."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import partial

from megarl.batch.trajectory import Prompt
from megarl.config.reward_code import CodeRewardConfig
from megarl.errors import RewardError, SandboxError
from megarl.reward.call_threads import CallThreads
from megarl.reward.code.grading import TestCase, is_passed
from megarl.reward.code.test_cases import TestCaseError, make_program, parse_setup, parse_tests
from megarl.reward.terms import Completion, TermError, TermValue, quote
from megarl.sandbox.tiers import open_sandbox

BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)


class CodeTerm:
    """Runs programs in sandboxes, and compares their outputs with the expected ones here."""

    compares_completions = False

    def __init__(self, name: str, config: CodeRewardConfig) -> None:
        """Create the term.

        Raises:
            ConfigError: no sandbox works on this machine.
        """
        self._label = f"reward.terms.{name} (code)"
        self._config = config
        self._sandbox = open_sandbox(config.sandbox, key=f"reward.terms.{name}.sandbox")
        self._threads = CallThreads(self._label, config.max_concurrent)

    async def score(self, completions: Sequence[Completion], prompt: Prompt) -> Sequence[TermValue | TermError]:
        """Return the value of each completion, with the share of passed tests as a metric; as `Term`."""
        try:
            tests = parse_tests(prompt.row, self._config.tests_field)
            setup = parse_setup(prompt.row, self._config.setup_field)
        except TestCaseError as e:
            raise RewardError(f"{self._label}: {prompt.prompt_id}: {e}") from e
        return await asyncio.gather(*(self._score(completion, prompt, tests, setup) for completion in completions))

    async def _score(
        self, completion: Completion, prompt: Prompt, tests: list[TestCase], setup: str
    ) -> TermValue | TermError:
        source = find_program(completion.text, require_block=self._config.require_block)
        if source is None:
            return TermValue(0.0, {"passed": 0.0})
        program = make_program(source, setup, tests)
        error: BaseException | None
        try:
            outcomes, error = await self._threads.run(partial(self._sandbox.run, program), self._config.timeout_seconds)
        except TimeoutError as e:
            outcomes, error = None, e
        if isinstance(error, SandboxError | TimeoutError):
            reason = error if isinstance(error, SandboxError) else "took longer than timeout_seconds"
            return TermError(f"{self._label}: {reason} {quote(completion, prompt)}")
        if error is not None:
            raise error
        assert isinstance(outcomes, list)
        num_passed = sum(is_passed(test, outcome) for test, outcome in zip(tests, outcomes, strict=True))
        share = num_passed / len(tests)
        return TermValue(float(share == 1) if self._config.score == "all" else share, {"passed": share})

    async def close(self) -> None:
        """Release the sandbox."""
        self._sandbox.close()


def find_program(text: str, *, require_block: bool) -> str | None:
    """Return the last block in backticks of a completion; without one, all of it, or None if one is required."""
    blocks = BLOCK.findall(text)
    if blocks:
        return str(blocks[-1])
    return None if require_block else text
