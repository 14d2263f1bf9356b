"""Which command a configuration is of."""

from __future__ import annotations

from pathlib import Path

from megarl.config.load import load_config, read_tree
from megarl.config.preference import DpoConfig, RmConfig
from megarl.config.run import RunConfig, SftConfig, StageConfig

STAGES: dict[str, type[StageConfig]] = {"train": RunConfig, "sft": SftConfig, "rm": RmConfig, "dpo": DpoConfig}
"""By command."""

OWN_SECTIONS: dict[str, type[StageConfig]] = {"algorithm": RunConfig, "rm": RmConfig, "dpo": DpoConfig}
"""What a resolved configuration has of that kind alone; one with none of them is fine-tuning's."""


def load_resolved(path: Path) -> StageConfig:
    """The configuration that `dump_config` has written to `path`, of whichever command.

    Raises:
        ConfigError: it cannot be read.
    """
    tree = read_tree(path)
    kind = next((kind for section, kind in OWN_SECTIONS.items() if section in tree), SftConfig)
    return load_config(kind, path)


def command_of(config: StageConfig) -> str:
    """The name in `STAGES`."""
    return next(name for name, kind in STAGES.items() if type(config) is kind)
