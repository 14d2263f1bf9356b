"""Frozen, validated configuration: one file per section, composed in `run`, read by `load`."""

from megarl.config.load import dump_config, load_config
from megarl.config.run import RunConfig, SftConfig, StageConfig

__all__ = ["RunConfig", "SftConfig", "StageConfig", "dump_config", "load_config"]
