"""The models that a run has beside its policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megarl.config.algorithm import (
    ActorCriticConfig,
    CriticConfig,
    DistillationConfig,
    FrozenModelConfig,
    PrimeConfig,
    SafeRlhfConfig,
)
from megarl.config.placement import Place
from megarl.config.reward import ModelRewardConfig
from megarl.config.trainer import OptimizerConfig, ParallelConfig

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

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


def roles_of(config: RunConfig) -> Iterator[Role]:
    """All but the policy."""
    algorithm = config.algorithm

    def role(
        place: Place,
        key: str,
        model: FrozenModelConfig | ModelRewardConfig,
        head: Literal["lm", "value"],
        name: str | None = None,
    ) -> Role:
        return Role(
            name=name or place,
            key=key,
            path=model.path or config.model.path,
            head=head,
            parallel=model.parallel or config.trainer.parallel,
            parallel_key="trainer.parallel" if model.parallel is None else f"{key}.parallel",
            optimizer=model.optimizer if isinstance(model, CriticConfig) else None,
            place=place,
            pool=config.placement.places[place].pool,
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
    for term, model in config.reward.models.items():
        yield role("reward_models", f"reward.terms.{term}", model, "value", name=SCORER.format(term))
