"""The auxiliary models of a run: reference, critics, reward models, teacher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megarl.config.algorithms.model_sections import FrozenModelConfig, TrainedModelConfig
from megarl.config.algorithms.policy import PolicyConfig
from megarl.config.model import ModelConfig
from megarl.config.placement import PlacementConfig
from megarl.config.reward import ModelRewardConfig, RewardsConfig
from megarl.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig

REWARD_MODEL_NAME = "reward {}"
"""Format of the name of a reward term's model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryModel:
    """A model that a run needs in addition to its policy."""

    name: str
    """Unique name within the run."""
    key: str
    """YAML path of its section."""
    path: str
    """Folder in Hugging Face format."""
    head: Literal["lm", "value"]
    """Output layer: language-model logits or one value per token."""
    parallel: ParallelConfig
    parallel_key: str
    """YAML path that `parallel` comes from."""
    optimizer: OptimizerConfig | None
    """None: the model is frozen."""
    role: str
    """Key under `placement`, or under `placement.models`, that chooses its pool."""
    pool: str
    """Name of its pool of slots."""

    @property
    def is_reward_model(self) -> bool:
        """Whether the model belongs to one of `reward.terms`."""
        return self.name.startswith(REWARD_MODEL_NAME.format(""))


def auxiliary_models_of(
    algorithm: PolicyConfig,
    reward: RewardsConfig,
    model: ModelConfig,
    trainer: TrainerConfig,
    placement: PlacementConfig,
) -> Iterator[AuxiliaryModel]:
    """Yield the auxiliary models that these sections of a run's configuration need."""

    def make(
        name: str, role: str, key: str, section: FrozenModelConfig | ModelRewardConfig, head: Literal["lm", "value"]
    ) -> AuxiliaryModel:
        return AuxiliaryModel(
            name=name,
            key=key,
            path=section.path or model.path,
            head=head,
            parallel=section.parallel or trainer.parallel,
            parallel_key="trainer.parallel" if section.parallel is None else f"{key}.parallel",
            optimizer=section.optimizer if isinstance(section, TrainedModelConfig) else None,
            role=role,
            pool=placement.pool_of(role),
        )

    for use in algorithm.models():
        yield make(use.name, use.role or use.name, f"algorithm.{use.field}", use.section, use.head)
    for term, model_term in reward.models.items():
        yield make(REWARD_MODEL_NAME.format(term), "reward_models", f"reward.terms.{term}", model_term, "value")
