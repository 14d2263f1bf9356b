"""Reward terms that run programs of the policy on test cases."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.reward_term import RuleConfig
from megarl.config.sandbox import SandboxConfig

AUTO = "auto"
"""Name of no field: the fields of the layout in which the row is published."""


class CodeRewardConfig(RuleConfig):
    """Share of a row's test cases that the completion's program passes, in a sandbox that gets inputs only.

    The program is the last block of the completion that is labelled as Python, or else the last one without a label, or
    else all of the completion. Test cases are those of MBPP,
    HumanEval, APPS, LiveCodeBench and other data sets as they are published; or lists of
    `{"call": "f(1)", "expected": 2}` and, for programs that read stdin and print, of `{"input": TEXT, "output": TEXT}`,
    where `accepted`, in place of `expected` or `output`, has a list of all outputs that are right.
    """

    type: Literal["code"]

    tests_field: str = AUTO
    """Field of a row with its test cases. `auto`: the first of `test_list` (MBPP), `test` with `entry_point` (HumanEval
    and HumanEval+), `input_output` (APPS, TACO), `public_test_cases` and `private_test_cases` (LiveCodeBench),
    `public_tests`, `private_tests` and `generated_tests` (CodeContests), `tests`, `test_cases`, `official_tests`,
    `verification_info` and `reward_model`."""

    setup_field: str | None = AUTO
    """Field of a row with source, or a list of its lines, that is executed after the program and before calls. `auto`:
    `test_imports` and `test_setup_code`; rows without them have none."""

    solution_field: str | None = AUTO
    """Field of a row with a program that passes its test cases, for `megarl check`, which runs some of them, and for
    expected values that are no literals. `auto`: `code`, `canonical_solution` or the first of `solutions`."""

    ungradable_rows: Literal["error", "drop"] = "error"
    """What to do with rows whose test cases cannot be used: end with an error before the run, or drop them."""

    score: Literal["all", "share"] = "all"
    """`all`: 1.0 if all test cases pass, else 0.0; those after the first failure are not run. `share`: the share that
    passes."""

    require_block: bool = False
    """Give a completion without a block in backticks 0.0 instead of running all of it."""

    max_concurrent: int = Field(default=4, ge=1)
    """Number of sandboxes of a rollout worker that run at once."""

    timeout_seconds: float = Field(default=120.0, gt=0)
    """Seconds for all test cases of a completion, from the start of its sandbox; each has at most
    `sandbox.wall_seconds`. Cases that are not done by then count as failed, since the program has used up the time."""

    sandbox: SandboxConfig = SandboxConfig()
    """Where programs run."""
