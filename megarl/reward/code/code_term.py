"""The reward term that runs a completion's program on the test cases of its row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megarl.batch.trajectory import Prompt
from megarl.config.reward import CodeRewardConfig
from megarl.errors import SandboxError
from megarl.reward.code.assertions import TestCaseError
from megarl.reward.code.grading import Grade, run_tests
from megarl.reward.code.test_cases import ReferenceSandbox, RowTests, load_tests
from megarl.reward.terms import CallThreads, Completion, TermError, TermValue, quote
from megarl.sandbox.session import find_code
from megarl.sandbox.tiers import open_sandbox

FAILURES = ("error", "timeout", "memory", "output", "killed", "undecided")
"""Metrics of completions whose program ended so on a test case; what it does to itself is a 0, and never a failure."""


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
        self._references = ReferenceSandbox(config.sandbox, key=f"reward.terms.{name}.sandbox")
        self._threads = CallThreads(self._label, config.max_concurrent)

    async def score(self, completions: Sequence[Completion], prompt: Prompt) -> Sequence[TermValue | TermError]:
        """Return the value of each completion, with the share of passed tests and `FAILURES` as metrics; as `Term`."""
        load = partial(load_tests, prompt.row, self._config, self._references.run)
        try:
            tests = await self._threads.call(load, None)
        except (TestCaseError, SandboxError) as e:  # all rows could be graded before the run
            return [TermError(f"{self._label}: {prompt.prompt_id}: {e}")] * len(completions)
        return await asyncio.gather(*(self._score(completion, prompt, tests) for completion in completions))

    async def _score(self, completion: Completion, prompt: Prompt, tests: RowTests) -> TermValue | TermError:
        source = find_program(completion.text, require_block=self._config.require_block)
        if source is None:
            return TermValue(0.0, {"passed": 0.0} | dict.fromkeys(FAILURES, 0.0))
        run = partial(self._run_tests, source, tests)
        try:
            grades = await self._threads.call(run, None)  # the sandbox ends it in time
        except SandboxError as e:
            return TermError(f"{self._label}: {e} {quote(completion, prompt)}")
        share = grades.count("passed") / len(tests.cases)
        failures = {name: float(name in grades) for name in FAILURES}
        return TermValue(float(share == 1) if self._config.score == "all" else share, {"passed": share} | failures)

    def _run_tests(self, source: str, tests: RowTests) -> list[Grade]:
        program = replace(tests.make_program(source), seconds=self._config.timeout_seconds)
        return run_tests(self._sandbox, program, tests.cases, stop_at_failure=self._config.score == "all")

    async def close(self) -> None:
        """Release the sandboxes of programs and of expected values."""
        self._sandbox.close()
        self._references.close()


def find_program(text: str, *, require_block: bool) -> str | None:
    """Return the code in backticks of a completion; without any, all of it, or None if a block is required."""
    code = find_code(text)
    return text if code is None and not require_block else code
