"""The configuration of `megarl convert`: the sections that set the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.load import make_config
from megarl.config.placement import PlacementConfig
from megarl.config.section import Section
from megarl.config.trainer import ParallelConfig


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
