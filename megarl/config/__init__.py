"""Frozen, validated configuration: one file per section, composed in `run`, loaded by `load`."""

from megarl.config.commands import (
    STAGES,
    ConvertConfig,
    ScoreConfig,
    command_of,
    load_resolved,
    make_convert_config,
    make_score_config,
)
from megarl.config.load import dump_config, load_config
from megarl.config.run import DpoConfig, RmConfig, RunConfig, SftConfig, StageConfig, SupervisedStageConfig

__all__ = [
    "STAGES",
    "ConvertConfig",
    "DpoConfig",
    "RmConfig",
    "RunConfig",
    "ScoreConfig",
    "SftConfig",
    "StageConfig",
    "SupervisedStageConfig",
    "command_of",
    "dump_config",
    "load_config",
    "load_resolved",
    "make_convert_config",
    "make_score_config",
]
