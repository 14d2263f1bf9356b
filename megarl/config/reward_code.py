"""Reward terms that run programs of the policy on test cases."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.reward_term import RuleConfig
from megarl.config.sandbox import SandboxConfig


class CodeRewardConfig(RuleConfig):
    """Share of a row's test cases that the completion's program passes, in a sandbox that gets inputs only.

    The program is the last block of the completion in backticks, or else all of it. Test cases are assertions such as
    MBPP's `assert f(1) == 2`, mappings `{"call": "f(1)", "expected": 2}`, or mappings `{"input": TEXT, "output": TEXT}`
    for programs that read stdin and print.
    """

    type: Literal["code"]

    tests_field: str = "test_list"
    """Field of a row with the list of its test cases."""

    setup_field: str | None = "test_setup_code"
    """Field of a row with source that is executed before the program, or with a list of its lines; rows without it have
    none."""

    solution_field: str | None = "code"
    """Field of a row with a program that passes its test cases, for `megarl check`, which runs some of them."""

    score: Literal["all", "share"] = "all"
    """`all`: 1.0 if all test cases pass, else 0.0. `share`: the share that passes."""

    require_block: bool = False
    """Give a completion without a block in backticks 0.0 instead of running all of it."""

    max_concurrent: int = Field(default=4, ge=1)
    """Number of sandboxes of a rollout worker that run at once."""

    timeout_seconds: float = Field(default=120.0, gt=0)
    """Timeout in seconds for one completion, with all its test cases and the start of the sandbox. Programs end at
    the limits of `sandbox` before, and fail; a timeout here is a failure of the term."""

    sandbox: SandboxConfig = SandboxConfig()
    """Where programs run."""
