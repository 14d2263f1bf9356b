"""Algorithms with a critic: PPO, PF-PPO, VAPO, Safe RLHF."""

from __future__ import annotations

from typing import ClassVar, Literal, override

from pydantic import Field, model_validator

from megarl.config.algorithms.policy import (
    ClippedPolicyConfig,
    CriticConfig,
    FrozenModelConfig,
    KlRewardConfig,
    ModelUse,
    TrainedModelConfig,
)
from megarl.config.reward import RewardsConfig
from megarl.config.section import Section
from megarl.config.trainer import OptimizerConfig


class PrimeConfig(ClippedPolicyConfig):
    """Process reinforcement through implicit rewards (arXiv 2502.01456)."""

    needs_group: ClassVar[bool] = True
    advantage_source: ClassVar[str] = "its reward model and outcomes"
    sequence_level: ClassVar[str | None] = "the loss of its reward model"
    supports_turn_advantages: ClassVar[bool] = False
    type: str = "prime"

    reward_model: TrainedModelConfig = TrainedModelConfig(optimizer=OptimizerConfig(lr=1e-6))
    """The implicit process reward model: a language model that is trained in every step."""

    beta: float = Field(default=0.05, gt=0)
    """Scale of process rewards: a token's is beta * (log pi_rm - log pi_reference)."""

    process_coefficient: float = Field(default=5.0, ge=0)
    """Factor of the advantages from process rewards."""

    outcome_coefficient: float = Field(default=5.0, ge=0)
    """Factor of the advantages from outcome rewards."""

    scale_process: bool = False
    """Multiply the deviation of a token's process reward from its completion's mean by n / (n - 1), n the group's
    size."""

    whiten: bool = False
    """Normalize a step's advantages to mean 0 and standard deviation 1."""

    whiten_unbiased: bool = False
    """Whitening divides by the standard deviation with n - 1 instead of n."""

    min_accuracy: float = Field(default=0.2, ge=0, le=1)
    """Prompts whose fraction of correct completions is below this are dropped from the step."""

    max_accuracy: float = Field(default=0.8, ge=0, le=1)
    """Prompts whose fraction of correct completions is above this are dropped from the step."""

    @model_validator(mode="after")
    def _check_accuracy_range(self) -> PrimeConfig:
        if self.min_accuracy > self.max_accuracy:
            raise ValueError(
                f"min_accuracy needs to be at most max_accuracy, got {self.min_accuracy:g} > {self.max_accuracy:g}: no "
                "prompt would be kept"
            )
        return self

    @property
    @override
    def uses_reference(self) -> bool:
        return True  # process rewards are relative to it

    @override
    def models(self) -> tuple[ModelUse, ...]:
        reward_model = ModelUse(
            name="reward_model", field="reward_model", section=self.reward_model, role="reward_models"
        )
        return (*super().models(), reward_model)


class DistillationConfig(ClippedPolicyConfig):
    """On-policy distillation: a token's advantage is log pi_teacher - log pi (arXiv 2306.13649, reverse KL)."""

    advantage_source: ClassVar[str] = "its teacher"
    supports_turn_advantages: ClassVar[bool] = False
    type: str = "distillation"
    group_size: int = Field(default=1, ge=1)

    teacher: FrozenModelConfig = FrozenModelConfig()
    """The teacher model. `teacher.path` is required, and the teacher needs the policy's vocabulary."""

    @model_validator(mode="after")
    def _check_teacher(self) -> DistillationConfig:
        if self.teacher.path is None:
            raise ValueError("teacher.path is required: the folder of the model to distill from")
        return self

    @override
    def models(self) -> tuple[ModelUse, ...]:
        return (*super().models(), ModelUse(name="teacher", field="teacher", section=self.teacher))


class ActorCriticConfig(ClippedPolicyConfig):
    """Fields of algorithms with a critic."""

    critic: CriticConfig = CriticConfig()
    """The value model that advantages are estimated with."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor per token."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of generalized advantage estimation (arXiv 1506.02438, equation 16)."""

    whiten: bool = True
    """Normalize a step's advantages to mean 0 and standard deviation 1."""

    whiten_unbiased: bool = False
    """Whitening divides by the standard deviation with n - 1 instead of n."""

    @override
    def models(self) -> tuple[ModelUse, ...]:
        return (*super().models(), ModelUse(name="critic", field="critic", section=self.critic, head="value"))


class PpoConfig(ActorCriticConfig):
    """Proximal policy optimization (arXiv 1707.06347) as used in RLHF (arXiv 2203.02155)."""

    type: str = "ppo"
    kl_reward: KlRewardConfig | None = KlRewardConfig()


class PfPpoConfig(ActorCriticConfig):
    """Policy-filtration PPO: resamples completions by how reliable their reward is (arXiv 2409.06957)."""

    needs_group: ClassVar[bool] = True
    type: str = "pf_ppo"
    filter: Literal["pow", "max_min", "max_random"] = "pow"
    """Weights that a prompt's completions are resampled with. `pow`: the squared reward, scaled to 0..1 within the
    group. `max_min`: equal for the group's highest and lowest rewards, 0 for the others. `max_random`: 0.4 for the
    group's highest rewards, 0.1 for the others."""

    kl_reward: KlRewardConfig | None = KlRewardConfig()


class ValuePretrainingConfig(Section):
    """VAPO's value pretraining: steps before those of `trainer.steps` that train only the critic, with the policy
    unchanged.
    """

    max_steps: int = Field(default=50, ge=0)
    """Largest number of pretraining steps. Pretraining ends earlier once the critic explains half of the variance of
    the returns and the value loss has changed by less than 2 % over 5 steps. 0: no pretraining."""


class VapoConfig(ActorCriticConfig):
    """Value-based augmented PPO (arXiv 2504.05118)."""

    type: str = "vapo"
    clip_ratio_high: float = Field(default=0.28, gt=0)

    length_alpha: float | None = Field(default=0.05, gt=0)
    """Length-adaptive lambda: a sequence's policy lambda is 1 - 1 / max(length_alpha * length, 1), with the length in
    tokens, and `lam` is the critic's. Sequences of up to 1 / length_alpha tokens have a lambda of 0: larger values suit
    short completions. null: `lam` for both."""

    nll_coefficient: float = Field(default=0.1, ge=0)
    """Factor of the negative log-likelihood of completions with a positive reward. 0: not added."""

    pretraining: ValuePretrainingConfig = ValuePretrainingConfig()
    """Value pretraining before the first policy update."""

    @property
    @override
    def pretraining_steps(self) -> int:
        return self.pretraining.max_steps


class SafeRlhfConfig(ActorCriticConfig):
    """Safe RLHF: maximizes the reward while a Lagrange multiplier holds the mean cost at a limit (arXiv 2310.12773)."""

    type: str = "safe_rlhf"
    cost_term: str = "cost"
    """The term of `reward.terms` that is a cost. It is not part of the reward."""

    cost_limit: float = 0.0
    """Limit of the mean cost per completion."""

    cost_critic: CriticConfig = CriticConfig()
    """The value model of the cost."""

    multiplier_lr: float = Field(default=0.1, ge=0)
    """Learning rate of the logarithm of the Lagrange multiplier."""

    multiplier_start: float = Field(default=1.0, gt=0)
    """Initial value of the Lagrange multiplier."""

    multiplier_max: float = Field(default=5.0, gt=0)
    """Upper bound of the Lagrange multiplier."""

    kl_reward: KlRewardConfig | None = KlRewardConfig()

    @override
    def models(self) -> tuple[ModelUse, ...]:
        cost_critic = ModelUse(name="cost_critic", field="cost_critic", section=self.cost_critic, head="value")
        return (*super().models(), cost_critic)

    @property
    @override
    def cost_terms(self) -> frozenset[str]:
        return frozenset({self.cost_term})

    @override
    def check_rewards(self, reward: RewardsConfig) -> None:
        terms = sorted(reward.terms)
        if self.cost_term not in terms:
            raise ValueError(f"algorithm.cost_term needs to be one of {terms}, got {self.cost_term!r}")
        if terms == [self.cost_term]:
            raise ValueError(
                f"algorithm.cost_term: {self.cost_term!r} is the only term of reward.terms; another term needs to be "
                "the reward"
            )
