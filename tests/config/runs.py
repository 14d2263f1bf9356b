"""Configurations of runs with the required keys, and the errors of those that are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from megarl.config import RunConfig, SftConfig
from megarl.config.load import make_config
from megarl.errors import ConfigError

REQUIRED = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}


def flow(text: str) -> dict[str, Any]:
    """Return the mapping that a recipe has as `{text}`."""
    tree: dict[str, Any] = yaml.safe_load(f"{{{text}}}")
    return tree


def make_run(*overrides: str, **sections: Any) -> RunConfig:
    return make_config(RunConfig, REQUIRED | sections, overrides)


def error_message(kind: type[RunConfig] | type[SftConfig] = RunConfig, *overrides: str, **sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        make_config(kind, REQUIRED | sections, overrides)
    return str(error.value)


def has_parts(text: str, pattern: str) -> bool:
    """Return whether the text begins with the first of the parts that "..." separates, and has the others in order."""
    return re.match(".*".join(re.escape(part.strip()) for part in pattern.split("...")), text, re.DOTALL) is not None
