"""The models that a run has beside its policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megarl.config.algorithms.algorithm import (
    ActorCriticConfig,
    AlgorithmConfig,
    CriticConfig,
    DistillationConfig,
    FrozenModelConfig,
    PrimeConfig,
    SafeRlhfConfig,
)
from megarl.config.model import ModelConfig
from megarl.config.placement import Place, PlacementConfig
from megarl.config.reward import ModelRewardConfig, RewardsConfig
from megarl.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig

SCORER = "reward {}"
"""Name of the role of a reward term's model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A model that a run needs."""

    name: str
    key: str
    """Where the configuration describes it."""
    path: str
    head: Literal["lm", "value"]
    parallel: ParallelConfig
    parallel_key: str
    """Where the configuration says that."""
    optimizer: OptimizerConfig | None
    """None: it never changes."""
    place: Place
    """Its key under `placement`."""
    pool: str
    """Name of its slots."""

    @property
    def is_scorer(self) -> bool:
        """Whether it is a reward term's."""
        return self.name.startswith(SCORER.format(""))


def roles_of(
    algorithm: AlgorithmConfig,
    reward: RewardsConfig,
    model: ModelConfig,
    trainer: TrainerConfig,
    placement: PlacementConfig,
) -> Iterator[Role]:
    """Yield the models that these sections of a run's configuration ask for beside the policy."""

    def role(
        place: Place,
        key: str,
        own: FrozenModelConfig | ModelRewardConfig,
        head: Literal["lm", "value"],
        name: str | None = None,
    ) -> Role:
        return Role(
            name=name or place,
            key=key,
            path=own.path or model.path,
            head=head,
            parallel=own.parallel or trainer.parallel,
            parallel_key="trainer.parallel" if own.parallel is None else f"{key}.parallel",
            optimizer=own.optimizer if isinstance(own, CriticConfig) else None,
            place=place,
            pool=placement.places[place].pool,
        )

    if algorithm.uses_reference:
        yield role("reference", "algorithm.reference", algorithm.reference, "lm")
    if isinstance(algorithm, ActorCriticConfig):
        yield role("critic", "algorithm.critic", algorithm.critic, "value")
    if isinstance(algorithm, SafeRlhfConfig):
        yield role("cost_critic", "algorithm.cost_critic", algorithm.cost_critic, "value")
    if isinstance(algorithm, PrimeConfig):
        yield role("reward_models", "algorithm.reward_model", algorithm.reward_model, "lm", name="reward_model")
    if isinstance(algorithm, DistillationConfig):
        yield role("teacher", "algorithm.teacher", algorithm.teacher, "lm")
    for term, scorer in reward.models.items():
        yield role("reward_models", f"reward.terms.{term}", scorer, "value", name=SCORER.format(term))
