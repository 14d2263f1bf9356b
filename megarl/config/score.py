"""The configuration of `megarl score`: of a run's sections, those that a forward pass depends on."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from megarl.config.load import make_config
from megarl.config.model import ModelConfig
from megarl.config.placement import PlacementConfig
from megarl.config.section import Section
from megarl.config.trainer import ParallelConfig


class ScoreTrainerConfig(Section):
    """Of `trainer`, what a forward pass depends on."""

    parallel: ParallelConfig = ParallelConfig()

    max_tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Token budget of one packed micro-batch; a longer sequence gets one of its own."""


class ScoreConfig(Section):
    """`megarl score`: log-probabilities of given tokens."""

    model: ModelConfig

    trainer: ScoreTrainerConfig = ScoreTrainerConfig()

    placement: PlacementConfig = PlacementConfig()
    """Where it names no number of slots, there are as many as one copy of the model needs; see `sized_placement`."""

    temperature: float = Field(default=1.0, gt=0)
    """Log-probabilities and entropies are of the distribution at this sampling temperature."""

    seed: int = Field(default=0, ge=0)

    @property
    def sized_placement(self) -> PlacementConfig:
        """`placement`, with the smallest world that the parallel sizes allow where it names neither nodes nor slots."""
        return self.placement.sized(self.trainer.parallel.smallest_world)


def make_score_config(
    model_path: str, overrides: Sequence[str] = (), *, slots: tuple[int, int] | None = None
) -> ScoreConfig:
    """The configuration for the model in `model_path`, with `overrides` ("a.b=c", the value in YAML) applied in order.

    Args:
        slots: nodes and slots of each, where no override says anything of `placement`'s.

    Raises:
        ConfigError: unknown keys, impossible values; every problem, one a line.
    """
    return make_config(ScoreConfig, {"model": {"path": model_path}}, overrides, slots=slots)
