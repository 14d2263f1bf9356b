"""Checks of the reward terms: regular expressions, Python functions, sandboxes and test cases."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.reward import FormatRewardConfig, PythonRewardConfig
from megarl.config.reward_code import CodeRewardConfig
from megarl.config.reward_services import JudgeRewardConfig
from megarl.config.run import RunConfig
from megarl.errors import ConfigError
from megarl.preflight.code_reward_checks import find_test_case_problems
from megarl.reward.python_function import check_reward
from megarl.reward.services.judge_term import check_judge_pattern
from megarl.reward.terms import compile_pattern
from megarl.sandbox.tiers import choose_tier


def find_reward_problems(config: RunConfig) -> Iterator[str]:
    """Find reward terms whose regular expression, Python function, sandbox or test cases cannot be used."""
    for name, term in config.reward.terms.items():
        key = f"reward.terms.{name}"
        try:
            match term:
                case FormatRewardConfig():
                    compile_pattern(term.pattern, key=f"{key}.pattern")
                case PythonRewardConfig():
                    check_reward(term, key=key)
                case CodeRewardConfig():
                    choose_tier(term.sandbox, key=f"{key}.sandbox")
                case JudgeRewardConfig():
                    check_judge_pattern(term, key=key)
        except ConfigError as e:
            yield str(e)
    yield from find_test_case_problems(config)
