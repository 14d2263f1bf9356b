"""The whole configuration of a run, composed of its sections."""

from __future__ import annotations

from pydantic import Field, model_validator

from megarl.config.algorithms.algorithm import (
    ActorCriticConfig,
    AlgorithmConfig,
    DapoConfig,
    GrpoConfig,
    SafeRlhfConfig,
)
from megarl.config.auxiliary_roles import Role, roles_of
from megarl.config.checkpoint import CheckpointConfig
from megarl.config.data import DataConfig
from megarl.config.limits import LimitsConfig
from megarl.config.model import ModelConfig
from megarl.config.placement import MAIN_POOL, PlacementConfig, PoolConfig, pool_key, require_layout
from megarl.config.recovery import RecoveryConfig
from megarl.config.reward import RewardsConfig
from megarl.config.rollout import RolloutConfig
from megarl.config.section import Section
from megarl.config.tracking import TrackingConfig
from megarl.config.trainer import TrainerConfig
from megarl.config.weight_sync import WeightSyncConfig


class StageConfig(Section):
    """What every training stage needs."""

    run_dir: str
    """Folder for everything the run writes."""

    seed: int = Field(default=0, ge=0)
    model: ModelConfig
    data: DataConfig
    trainer: TrainerConfig = TrainerConfig()
    placement: PlacementConfig = PlacementConfig()
    tracking: TrackingConfig = TrackingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    export_dir: str | None = None
    """Where the trained model is written in Hugging Face format. Default: `<run_dir>/model`."""

    @model_validator(mode="after")
    def _world_divides(self) -> StageConfig:
        there: set[str] = {role.place for role in self.roles}
        for place, placed in self.placement.places.items():
            if placed.pool != MAIN_POOL and place not in there:
                raise ValueError(f"placement.{place}.pool is {placed.pool!r}, and the run has no such model")
        if self.placement.rollout.pool != MAIN_POOL and not isinstance(self, RunConfig):
            raise ValueError(f"placement.rollout.pool is {self.placement.rollout.pool!r}, and the stage has no engines")
        require_layout(self.trainer.parallel, self.placement, key="trainer.parallel", where="placement")
        for role in self.roles:
            own = role.parallel_key.startswith(role.key)
            require_layout(
                role.parallel,
                self.placement.all_pools[role.pool],
                key=role.parallel_key if own else f"trainer.parallel, for {role.key},",
                where=pool_key(role.pool),
            )
        return self

    @property
    def roles(self) -> tuple[Role, ...]:
        """The models beside the one that is trained."""
        return ()

    @property
    def dp(self) -> int:
        """Data-parallel size: slots / (tp * pp * cp)."""
        return self.placement.slots // self.trainer.parallel.model_size

    @property
    def export_path(self) -> str:
        """Where the trained model is written."""
        return self.export_dir or f"{self.run_dir}/model"


class SftConfig(StageConfig):
    """`megarl sft`: supervised fine-tuning on demonstrations."""

    @model_validator(mode="after")
    def _offloads_nothing(self) -> SftConfig:
        if self.trainer.offload.anything:
            raise ValueError("trainer.offload: fine-tuning has no phase in which engines need the memory")
        return self


class RunConfig(StageConfig):
    """`megarl train`: reinforcement learning."""

    algorithm: AlgorithmConfig = GrpoConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardsConfig = RewardsConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    limits: LimitsConfig = LimitsConfig()
    recovery: RecoveryConfig = RecoveryConfig()

    @property
    def roles(self) -> tuple[Role, ...]:
        """The models beside the policy."""
        return tuple(roles_of(self.algorithm, self.reward, self.model, self.trainer, self.placement))

    @model_validator(mode="after")
    def _engines_fit(self) -> RunConfig:
        tp, replicas, pool = self.rollout.tp, self.rollout.replicas, self.rollout_pool
        key = pool_key(self.placement.rollout.pool)
        if tp * replicas > pool.slots:
            raise ValueError(
                f"rollout needs tp * replicas <= slots, got {tp} * {replicas} = {tp * replicas} > {pool.slots} "
                f"({key}.nodes * {key}.slots_per_node)"
            )
        if tp > pool.slots_per_node:
            raise ValueError(
                f"rollout.tp needs to fit one node, got rollout.tp = {tp} > {key}.slots_per_node = "
                f"{pool.slots_per_node}"
            )
        return self

    @model_validator(mode="after")
    def _engines_apart_receive(self) -> RunConfig:
        if not self.engines_apart:
            return self
        name, strategy = self.placement.rollout.pool, self.weight_sync.strategy
        if strategy not in ("auto", "exact"):
            raise ValueError(
                f"weight_sync.strategy needs auto or exact where engines have slots of their own "
                f"(placement.rollout.pool is {name!r}), got {strategy}"
            )
        for place, role in self.placement.places.items():
            if role.pool == name:
                raise ValueError(
                    f"placement.{place}.pool is {name!r}, where the engines are; they share slots with the trainer's "
                    "processes, or have their own"
                )
        return self

    @property
    def engines_apart(self) -> bool:
        """Whether engines have slots of their own, where they receive weights over the network."""
        return self.placement.rollout.pool != MAIN_POOL

    @property
    def rollout_pool(self) -> PoolConfig:
        """Where the engines are."""
        return self.placement.all_pools[self.placement.rollout.pool]

    @model_validator(mode="after")
    def _terms_exist(self) -> RunConfig:
        algorithm, terms = self.algorithm, sorted(self.reward.terms)
        if self.data.eval_path is not None and not self.reward.rules:
            raise ValueError(
                f"data.eval_path: evaluation scores completions by rules, and reward.terms has only models, {terms}; "
                "leave it out, or add a rule (with weight: 0 it is no part of the reward)"
            )
        if isinstance(algorithm, DapoConfig):
            if algorithm.filter_metric is None and not self.reward.rules:
                raise ValueError(f"algorithm.filter_metric needs one of {terms} where no term is a rule, got null")
            if algorithm.filter_metric not in (None, *terms):
                raise ValueError(f"algorithm.filter_metric needs one of {terms}, got {algorithm.filter_metric!r}")
        if isinstance(algorithm, SafeRlhfConfig):
            if algorithm.cost_term not in terms:
                raise ValueError(f"algorithm.cost_term needs one of {terms}, got {algorithm.cost_term!r}")
            if terms == [algorithm.cost_term]:
                raise ValueError(
                    f"algorithm.cost_term: {algorithm.cost_term!r} is the only one of reward.terms, which leaves no "
                    "reward to raise"
                )
        return self

    @model_validator(mode="after")
    def _limits_are_measured(self) -> RunConfig:
        if self.limits.kl is not None and self.algorithm.kl_loss is None and self.algorithm.kl_reward is None:
            raise ValueError("limits.kl needs algorithm.kl_loss or algorithm.kl_reward, which measure it, got null")
        return self

    @model_validator(mode="after")
    def _policy_is_trained(self) -> RunConfig:
        algorithm, steps = self.algorithm, self.trainer.steps
        critics_only: dict[str, int] = {}
        if isinstance(algorithm, ActorCriticConfig):
            critics_only["critic.warmup_steps"] = algorithm.critic.warmup_steps
        if isinstance(algorithm, SafeRlhfConfig):
            critics_only["cost_critic.warmup_steps"] = algorithm.cost_critic.warmup_steps
        for key, only in critics_only.items():
            if only >= steps:
                raise ValueError(
                    f"algorithm.{key} needs to be below trainer.steps, got {only} >= {steps}: the policy would not be "
                    "trained"
                )
        return self
