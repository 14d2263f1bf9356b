"""The section `algorithm`: the fields of each algorithm, by `type`; one outside the package by its import path."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, ClassVar, Literal, override

from pydantic import (
    Discriminator,
    Field,
    SerializeAsAny,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from megarl.config.policy import (
    Aggregation,
    ClippedPolicyConfig,
    ClipRatioConfig,
    CriticConfig,
    FrozenModelConfig,
    KlLossConfig,
    KlRewardConfig,
    ModelUse,
    PolicyConfig,
    TrainedModelConfig,
)
from megarl.config.reward import RewardsConfig
from megarl.config.section import Section, load_object
from megarl.config.trainer import OptimizerConfig
from megarl.errors import ConfigError


class GroupPolicyConfig(PolicyConfig):
    """Algorithms that compare a completion's reward with those of the other completions of its prompt."""

    needs_group: ClassVar[bool] = True

    group_baseline: ClassVar[Literal["grpo", "dr_grpo", "rloo"]] = "grpo"
    """The advantage estimator: `kind` of `megarl.functional.group_advantages`."""


class ClippedGroupPolicyConfig(ClippedPolicyConfig, GroupPolicyConfig):
    """Algorithms with a group baseline and the policy loss of PPO."""


class GrpoConfig(ClippedGroupPolicyConfig):
    """Group-relative policy optimization (arXiv 2402.03300)."""

    type: str = "grpo"
    kl_loss: KlLossConfig | None = KlLossConfig()


class DrGrpoConfig(ClippedGroupPolicyConfig):
    """GRPO without its length bias and difficulty bias (arXiv 2503.20783)."""

    group_baseline = "dr_grpo"
    type: str = "dr_grpo"
    aggregation: Aggregation = "seq-mean-token-sum-norm"


class RlooConfig(ClippedGroupPolicyConfig):
    """REINFORCE leave-one-out (arXiv 2402.14740)."""

    group_baseline = "rloo"
    type: str = "rloo"
    kl_reward: KlRewardConfig | None = KlRewardConfig()


class GspoConfig(ClipRatioConfig, GroupPolicyConfig):
    """Group sequence policy optimization: one importance ratio per sequence (arXiv 2507.18071)."""

    sequence_level: ClassVar[str | None] = "importance ratios"
    type: str = "gspo"
    clip_ratio_low: float = Field(default=3e-4, gt=0)
    clip_ratio_high: float = Field(default=4e-4, gt=0)
    aggregation: Aggregation = "seq-mean-token-mean"


class CispoConfig(GroupPolicyConfig):
    """Clipped importance weights that keep the gradient of every token (arXiv 2506.13585)."""

    type: str = "cispo"
    clip_ratio_high: float = Field(default=4.0, gt=0)
    """The importance weight is clipped at 1 + clip_ratio_high, from above only. Values from 4 to 8 perform similarly
    (arXiv 2510.13786)."""


class GmpoConfig(GroupPolicyConfig):
    """Geometric-mean policy optimization (arXiv 2507.20673)."""

    sequence_level: ClassVar[str | None] = "geometric means of ratios"
    type: str = "gmpo"
    clip_log_ratio_low: float = Field(default=0.4, gt=0)
    """The logarithm of a token's importance ratio is clipped below at -clip_log_ratio_low."""

    clip_log_ratio_high: float = Field(default=0.4, gt=0)
    """The logarithm of a token's importance ratio is clipped above at clip_log_ratio_high."""

    aggregation: Aggregation = "seq-mean-token-mean"


class OverlongConfig(Section):
    """DAPO's soft penalty on long completions (arXiv 2503.14476, equation 13)."""

    max_length: int | None = Field(default=None, ge=1)
    """Number of sampled tokens at which the penalty reaches `factor`. Default: `rollout.max_new_tokens`."""

    buffer: int | None = Field(default=None, ge=1)
    """Number of tokens before `max_length` over which the penalty grows linearly from 0. Default: a fifth of
    `max_length`, as in the paper."""

    factor: float = Field(default=1.0, ge=0)
    """The largest penalty, subtracted from the reward."""

    def bounds(self, max_new_tokens: int) -> tuple[int, int]:
        """`max_length` and `buffer` in tokens, with defaults filled in."""
        max_length = self.max_length or max_new_tokens
        return max_length, self.buffer or max(1, max_length // 5)


class DapoConfig(ClippedGroupPolicyConfig):
    """Decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476)."""

    type: str = "dapo"
    clip_ratio_high: float = Field(default=0.28, gt=0)

    overlong: OverlongConfig | None = OverlongConfig()
    """Penalty on long completions. null: none."""

    filter_metric: str | None = None
    """The reward term that dynamic sampling looks at: groups whose completions all have the same value are replaced by
    new prompts. Default: the term of `reward.eval_term`."""

    max_batches: int = Field(default=10, ge=1)
    """Largest number of batches of prompts that one step samples to fill itself with informative groups."""

    @override
    def terms_of_every_completion(self, reward: RewardsConfig) -> frozenset[str]:
        return frozenset({self.filter_metric or reward.eval_name})

    @override
    def check_rewards(self, reward: RewardsConfig) -> None:
        terms = sorted(reward.terms)
        if self.filter_metric is None and not reward.rules:
            raise ValueError(f"algorithm.filter_metric needs to be one of {terms}, as no term is a rule, got null")
        if self.filter_metric not in (None, *terms):
            raise ValueError(f"algorithm.filter_metric needs to be one of {terms}, got {self.filter_metric!r}")


class ReinforcePlusPlusConfig(ClippedPolicyConfig):
    """REINFORCE++: discounted returns, whitened over the batch (arXiv 2501.03262)."""

    type: str = "reinforce_pp"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor per token."""

    whiten_unbiased: bool = False
    """Whitening divides by the standard deviation with n - 1 instead of n."""

    kl_reward: KlRewardConfig | None = KlRewardConfig()


class ReinforcePlusPlusBaselineConfig(ClippedGroupPolicyConfig):
    """REINFORCE++ with the group's mean as baseline, whitened over the batch (arXiv 2501.03262, section 3)."""

    type: str = "reinforce_pp_baseline"
    whiten_unbiased: bool = False
    """Whitening divides by the standard deviation with n - 1 instead of n."""

    kl_loss: KlLossConfig | None = KlLossConfig(kind="k2")


class RemaxConfig(ClippedPolicyConfig):
    """ReMax: the baseline is the reward of the greedy completion (arXiv 2310.10505)."""

    needs_greedy_baseline: ClassVar[bool] = True

    type: str = "remax"
    kl_reward: KlRewardConfig | None = KlRewardConfig()


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


IMPORTED_TAG = "package.module:Class"


def load_algorithm_class(path: str) -> type[object]:
    """Import the algorithm class at `package.module:Class`; its attribute `Config` describes the section `algorithm`.

    Raises:
        ConfigError: there is no such class, it has no method `train`, or `Config` does not extend `PolicyConfig`.
    """
    key = "algorithm.type"
    found = load_object(path, key=key, kind="Class")
    if not isinstance(found, type) or not callable(getattr(found, "train", None)):
        raise ConfigError(f"{key} needs a class with a method train(run, config), got {path} = {found!r}")
    config_class = getattr(found, "Config", None)
    if not (isinstance(config_class, type) and issubclass(config_class, PolicyConfig)):
        raise ConfigError(f"{key}: {path}.Config needs to be a subclass of PolicyConfig, got {config_class!r}")
    return found


def _validate_imported(value: object, _: ValidatorFunctionWrapHandler) -> PolicyConfig:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    config_class: type[PolicyConfig] = load_algorithm_class(str(kind)).Config  # type: ignore[attr-defined]
    return config_class.model_validate(value)


def _tag(value: object) -> Hashable:
    kind = value.get("type", "grpo") if isinstance(value, dict) else getattr(value, "type", "grpo")
    return IMPORTED_TAG if isinstance(kind, str) and ":" in kind else kind


AlgorithmConfig = Annotated[
    Annotated[GrpoConfig, Tag("grpo")]
    | Annotated[DrGrpoConfig, Tag("dr_grpo")]
    | Annotated[RlooConfig, Tag("rloo")]
    | Annotated[GspoConfig, Tag("gspo")]
    | Annotated[CispoConfig, Tag("cispo")]
    | Annotated[GmpoConfig, Tag("gmpo")]
    | Annotated[DapoConfig, Tag("dapo")]
    | Annotated[ReinforcePlusPlusConfig, Tag("reinforce_pp")]
    | Annotated[ReinforcePlusPlusBaselineConfig, Tag("reinforce_pp_baseline")]
    | Annotated[RemaxConfig, Tag("remax")]
    | Annotated[PpoConfig, Tag("ppo")]
    | Annotated[PfPpoConfig, Tag("pf_ppo")]
    | Annotated[VapoConfig, Tag("vapo")]
    | Annotated[SafeRlhfConfig, Tag("safe_rlhf")]
    | Annotated[PrimeConfig, Tag("prime")]
    | Annotated[DistillationConfig, Tag("distillation")]
    | Annotated[SerializeAsAny[PolicyConfig], WrapValidator(_validate_imported), Tag(IMPORTED_TAG)],
    Discriminator(_tag),
]
"""Configuration of any algorithm; `type` chooses which, `grpo` by default."""
