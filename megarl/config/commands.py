"""The commands that train, and the configuration type of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from megarl.config.load import make_config, read_tree
from megarl.config.model import ModelConfig
from megarl.config.placement import PlacementConfig
from megarl.config.run import DpoConfig, RmConfig, RunConfig, SftConfig, StageConfig
from megarl.config.section import Section, Seed
from megarl.config.trainer import ParallelConfig


class ScoreTrainerConfig(Section):
    """The keys of `trainer` that a forward pass depends on."""

    parallel: ParallelConfig = ParallelConfig()
    """Parallel sizes of the model."""

    fused_lm_head: bool | None = None
    """Compute log-probabilities and entropies with the logits of some columns of the vocabulary at a time. Default:
    true on CUDA."""

    max_tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Maximum number of tokens of one packed micro-batch. A longer sequence gets a micro-batch of its own."""


class ScoreConfig(Section):
    """`megarl score`: log-probabilities and entropies of given tokens."""

    model: ModelConfig

    trainer: ScoreTrainerConfig = ScoreTrainerConfig()

    placement: PlacementConfig = PlacementConfig()
    """Slots of the command. Default: as many as one replica of the model needs."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the distribution that log-probabilities and entropies refer to."""

    seed: Seed = 0
    """Random seed of the ranks."""

    @property
    def sized_placement(self) -> PlacementConfig:
        """`placement`; where it names neither nodes nor slots, with the smallest world size of the parallel sizes."""
        return self.placement.with_default_slots(self.trainer.parallel.min_world_size)


def make_score_config(
    model_path: str,
    overrides: Sequence[str] = (),
    *,
    family: str | None = None,
    slots: tuple[int, int] | None = None,
) -> ScoreConfig:
    """Make the configuration for the model in `model_path`, with `overrides` ("a.b=c", the value in YAML) in order.

    Args:
        family: import path of the model's family, if that is outside the package.
        slots: (nodes, slots per node), used where no override sets either of them.

    Raises:
        ConfigError: unknown keys or invalid values; lists all problems, one per line.
    """
    return make_config(ScoreConfig, {"model": {"path": model_path, "family": family}}, overrides, slots=slots)


class ConvertTrainerConfig(Section):
    """The keys of `trainer` that a conversion uses."""

    parallel: ParallelConfig = ParallelConfig()
    """Parallel sizes: each rank holds and writes its shard of the model. The output can be loaded in any layout."""


class ConvertConfig(Section):
    """`megarl convert`: conversion between Hugging Face and Megatron formats."""

    trainer: ConvertTrainerConfig = ConvertTrainerConfig()

    placement: PlacementConfig = PlacementConfig()
    """Slots of the conversion. Default: as many as one replica of the model needs."""

    @property
    def sized_placement(self) -> PlacementConfig:
        """`placement`; where it names neither nodes nor slots, with the smallest world size of the parallel sizes."""
        return self.placement.with_default_slots(self.trainer.parallel.min_world_size)


def make_convert_config(overrides: Sequence[str] = ()) -> ConvertConfig:
    """Make the configuration from `overrides` ("a.b=c", the value in YAML), applied in order.

    Raises:
        ConfigError: unknown keys or invalid values; lists all problems, one per line.
    """
    return make_config(ConvertConfig, {}, overrides)


STAGES: dict[str, type[StageConfig]] = {"train": RunConfig, "sft": SftConfig, "rm": RmConfig, "dpo": DpoConfig}
"""Command -> type of its configuration."""

STAGE_BY_SECTION: dict[str, type[StageConfig]] = {"algorithm": RunConfig, "rm": RmConfig, "dpo": DpoConfig}
"""Section -> the only configuration type that has it. A configuration with none of these is an `SftConfig`."""


def load_resolved(path: Path) -> StageConfig:
    """Load a configuration that `dump_config` wrote to `path`, perhaps in an earlier version, and infer its type.

    Raises:
        ConfigError: the file cannot be read or is invalid.
    """
    tree = read_tree(path)
    kind = next((kind for section, kind in STAGE_BY_SECTION.items() if section in tree), SftConfig)
    return make_config(kind, tree, origin=str(path), is_record=True)


def command_of(config: StageConfig) -> str:
    """Return the command of a configuration: its name in `STAGES`."""
    return next(name for name, kind in STAGES.items() if type(config) is kind)
