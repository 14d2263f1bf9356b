"""Checks of the reward terms: regular expressions and Python functions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.config.reward import FormatRewardConfig, PythonRewardConfig
from megarl.config.run import RunConfig
from megarl.errors import ConfigError
from megarl.reward.python_function import load_reward_function


def find_reward_problems(config: RunConfig) -> Iterator[str]:
    """Find reward terms whose regular expression or Python function cannot be loaded."""
    for name, term in config.reward.terms.items():
        key = f"reward.terms.{name}"
        match term:
            case FormatRewardConfig(pattern=pattern):
                try:
                    re.compile(pattern)
                except re.error as e:
                    yield f"{key}.pattern: needs a regular expression, got {pattern!r}: {e}"
            case PythonRewardConfig(path=path):
                try:
                    load_reward_function(path, key=f"{key}.path")
                except ConfigError as e:
                    yield str(e)
