"""The commands that train, and the configuration type of each."""

from __future__ import annotations

from pathlib import Path

from megarl.config.load import load_config, read_tree
from megarl.config.preference import DpoConfig, RmConfig
from megarl.config.run import RunConfig, SftConfig, StageConfig

STAGES: dict[str, type[StageConfig]] = {"train": RunConfig, "sft": SftConfig, "rm": RmConfig, "dpo": DpoConfig}
"""Command -> type of its configuration."""

STAGE_BY_SECTION: dict[str, type[StageConfig]] = {"algorithm": RunConfig, "rm": RmConfig, "dpo": DpoConfig}
"""Section -> the only configuration type that has it. A configuration with none of these is an `SftConfig`."""


def load_resolved(path: Path) -> StageConfig:
    """Load a configuration that `dump_config` wrote to `path`, and infer its type.

    Raises:
        ConfigError: the file cannot be read or is invalid.
    """
    tree = read_tree(path)
    kind = next((kind for section, kind in STAGE_BY_SECTION.items() if section in tree), SftConfig)
    return load_config(kind, path)


def command_of(config: StageConfig) -> str:
    """Return the command of a configuration: its name in `STAGES`."""
    return next(name for name, kind in STAGES.items() if type(config) is kind)
