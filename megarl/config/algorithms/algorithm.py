"""One class an algorithm. All share the fields of `PolicyConfig`: another `type` is all that switching needs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, model_validator

from megarl.config.algorithms.presets import Preset, preset_values
from megarl.config.section import Section, by_type
from megarl.config.trainer import OptimizerConfig, ParallelConfig

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Surrogate = Literal["clip", "gspo", "cispo", "gmpo"]
KlKind = Literal["k1", "k2", "k3"]


class KlConfig(Section):
    """A penalty on leaving the reference model."""

    coefficient: float = Field(default=1e-3, ge=0)
    """Factor of the penalty per token."""

    kind: KlKind = "k3"
    """Estimator from d = log pi - log pi_ref (Schulman, 2020): `k1` d, `k2` d^2 / 2, `k3` e^-d - 1 + d."""

    @model_validator(mode="after")
    def _does_something(self) -> KlConfig:
        if self.coefficient == 0:
            raise ValueError(
                "coefficient needs to be above 0, got 0: a penalty of nothing costs a reference model all the same; "
                "set the section to null"
            )
        return self


class KlRewardConfig(KlConfig):
    """The penalty as part of each token's reward."""

    kind: KlKind = "k1"

    target: float | None = Field(default=None, gt=0)
    """Divergence per token at which the coefficient stays; it adapts (arXiv 1909.08593, section 2.2). Default: it does
    not."""

    horizon: int = Field(default=10_000, ge=1)
    """Completions over which an adapting coefficient changes by a fifth at most."""


class CorrectionConfig(Section):
    """Importance weights for what engine and trainer disagree about: pi_trainer,old / pi_rollout."""

    kind: Literal["token_tis", "sequence_tis", "icepop", "geometric_mask"] = "token_tis"
    """`token_tis`, `sequence_tis`: weights truncated at `high`. `icepop`: tokens outside [low, high] count nothing.
    `geometric_mask`: sequences whose mean ratio is outside [low, high] count nothing."""

    low: float | None = Field(default=None, ge=0)
    """Default: 0.5 for `icepop`, 0.999 for `geometric_mask`."""

    high: float | None = Field(default=None, gt=0)
    """Default: 2 for truncation, 5 for `icepop`, 1.001 for `geometric_mask`."""

    @model_validator(mode="after")
    def _lets_something_through(self) -> CorrectionConfig:
        low, high = self.bounds
        if low >= high:
            raise ValueError(f"low needs to be below high, got {low:g} >= {high:g} for {self.kind}")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """`low` and `high`, defaults filled in."""
        low, high = {"icepop": (0.5, 5.0), "geometric_mask": (0.999, 1.001)}.get(self.kind, (0.0, 2.0))
        return (low if self.low is None else self.low), (high if self.high is None else self.high)


class FrozenModelConfig(Section):
    """A model that is only evaluated."""

    path: str | None = None
    """Folder in Hugging Face format. Default: `model.path`."""

    parallel: ParallelConfig | None = None
    """Default: `trainer.parallel`."""


class CriticConfig(FrozenModelConfig):
    """A model of the returns that are still to come, trained beside the policy."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)

    clip: float | None = Field(default=0.5, gt=0)
    """A value may leave its old one by so much before its loss stops pulling. null: no limit."""

    warmup_steps: int = Field(default=0, ge=0)
    """First steps in which the critic alone is trained."""


class PolicyConfig(Section):
    """Fields that every algorithm shares."""

    surrogate: ClassVar[Surrogate] = "clip"
    """The policy loss."""
    baseline_is_group: ClassVar[bool] = False
    """A completion is compared with the others of its prompt."""
    advantages_from: ClassVar[str] = "rewards"
    """What tells tokens apart; only rewards can lose `kl_reward`."""

    type: str
    preset: Preset = "default"
    """`paper`: values of the algorithm's paper; `compat:NAME`: what NAME computes. Fields that are given win."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts that one controller step samples."""

    group_size: int = Field(default=8, ge=1)
    """Completions sampled per prompt."""

    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a step's completions; whole groups are split evenly among them."""

    epochs: int = Field(default=1, ge=1)
    """Passes over a step's completions."""

    clip_low: float = Field(default=0.2, gt=0)
    """The importance ratio is clipped below at 1 - clip_low."""

    clip_high: float = Field(default=0.2, gt=0)
    """The importance ratio is clipped above at 1 + clip_high."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of negative advantages at -dual_clip * A (arXiv 1912.09729). Default: off."""

    aggregation: Aggregation = "token-mean"
    """How token losses become one number; every denominator is global over the mini-batch."""

    length_norm: int | None = Field(default=None, ge=1)
    """The constant that `seq-mean-token-sum-norm` divides by. Default: rollout.max_new_tokens."""

    kl_loss: KlConfig | None = None
    """A penalty on leaving the reference model, in the loss."""

    kl_reward: KlRewardConfig | None = None
    """The same in the reward of each token."""

    kl_in_both: bool = False
    """Says that a penalty in the loss and in the reward at once is meant."""

    reference: FrozenModelConfig = FrozenModelConfig()
    """What penalties measure from; it is built where there is one. Default: the model that training starts from."""

    correction: CorrectionConfig | None = None
    """Weights for what engine and trainer disagree about. Default: none."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kind = cls.model_fields["type"].default
        for name in ("critic", "cost_critic"):
            if name in data and name not in cls.model_fields:
                raise ValueError(f"{name}: {_without(cls, kind, name)}")
        return preset_values(kind, data.get("preset", "default"), data)

    @model_validator(mode="after")
    def _possible(self) -> PolicyConfig:
        if self.prompts_per_step % self.mini_batches:
            raise ValueError(
                f"mini_batches needs to divide prompts_per_step, got {self.prompts_per_step} % {self.mini_batches} = "
                f"{self.prompts_per_step % self.mini_batches}"
            )
        if self.baseline_is_group and self.group_size < 2:
            raise ValueError(
                f"group_size needs to be at least 2, got {self.group_size}: the other completions of a prompt are the "
                f"baseline of {self.type}"
            )
        if self.surrogate in ("clip", "gspo") and self.clip_low >= 1:
            raise ValueError(f"clip_low needs to be below 1, got {self.clip_low:g}: ratios are positive")
        if self.length_norm is not None and self.aggregation != "seq-mean-token-sum-norm":
            raise ValueError(
                f"length_norm is what seq-mean-token-sum-norm divides by, got length_norm = {self.length_norm} with "
                f"aggregation = {self.aggregation}"
            )
        if self.kl_loss is not None and self.kl_reward is not None and not self.kl_in_both:
            raise ValueError(
                "kl_loss and kl_reward are both given, which punishes the same divergence twice; set one to null, or "
                "say kl_in_both: true"
            )
        if self.kl_reward is not None and self.advantages_from != "rewards":
            raise ValueError(
                f"kl_reward takes from rewards and the advantages of {self.type} come from {self.advantages_from}; "
                "leave it out or give kl_loss"
            )
        for name in ("path", "parallel"):
            if getattr(self.reference, name) is not None and not self.uses_reference:
                raise ValueError(
                    f"reference.{name} is given and nothing measures from a reference model: kl_loss and kl_reward are "
                    "null; leave it out or give one of them"
                )
        return self

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model is needed."""
        return self.kl_loss is not None or self.kl_reward is not None

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per controller step."""
        return self.mini_batches * self.epochs


def _without(cls: type[PolicyConfig], kind: str, name: str) -> str:
    """Why there is no such section."""
    if name == "cost_critic" and "critic" in cls.model_fields:
        return f"{kind} has no costs and so no critic of them; leave it out or choose safe_rlhf"
    why = "the completions of a prompt are each other's baseline" if cls.baseline_is_group else "it needs none"
    return f"{kind} has no critic, {why}; leave it out or choose ppo"


class GroupPolicyConfig(PolicyConfig):
    """Algorithms whose advantage is a completion's reward against its group's."""

    baseline_is_group: ClassVar[bool] = True

    group_baseline: ClassVar[Literal["grpo", "dr_grpo", "rloo"]] = "grpo"


class GrpoConfig(GroupPolicyConfig):
    """Group-relative policy optimisation (arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"
    kl_loss: KlConfig | None = KlConfig()


class DrGrpoConfig(GroupPolicyConfig):
    """GRPO without the biases of length and difficulty (arXiv 2503.20783)."""

    group_baseline = "dr_grpo"
    type: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = "seq-mean-token-sum-norm"


class RlooConfig(GroupPolicyConfig):
    """REINFORCE leave-one-out (arXiv 2402.14740)."""

    group_baseline = "rloo"
    type: Literal["rloo"] = "rloo"
    kl_reward: KlRewardConfig | None = KlRewardConfig()


class GspoConfig(GroupPolicyConfig):
    """Group sequence policy optimisation: one ratio a sequence (arXiv 2507.18071)."""

    surrogate = "gspo"
    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0)
    clip_high: float = Field(default=4e-4, gt=0)
    aggregation: Aggregation = "seq-mean-token-mean"


class CispoConfig(GroupPolicyConfig):
    """Clipped importance weights, no clipped gradients (arXiv 2506.13585)."""

    surrogate = "cispo"
    type: Literal["cispo"] = "cispo"
    clip_high: float = Field(default=4.0, gt=0)
    """The weight is clipped above at 1 + clip_high (arXiv 2510.13786 finds 4 to 8 alike); `clip_low` is not used."""


class GmpoConfig(GroupPolicyConfig):
    """Geometric-mean policy optimisation (arXiv 2507.20673)."""

    surrogate = "gmpo"
    type: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, gt=0)
    """The log of a token's ratio is clipped below at -clip_low."""

    clip_high: float = Field(default=0.4, gt=0)
    """The log of a token's ratio is clipped above at clip_high."""

    aggregation: Aggregation = "seq-mean-token-mean"


class OverlongConfig(Section):
    """DAPO's soft punishment of long completions (arXiv 2503.14476, equation 13)."""

    max_length: int | None = Field(default=None, ge=1)
    """Sampled tokens at which the penalty is `factor`. Default: rollout.max_new_tokens."""

    buffer: int | None = Field(default=None, ge=1)
    """Over so many tokens it grows from 0. Default: a fifth of `max_length`, as in the paper."""

    factor: float = Field(default=1.0, ge=0)

    def bounds(self, max_new_tokens: int) -> tuple[int, int]:
        """`max_length` and `buffer`, defaults filled in."""
        max_length = self.max_length or max_new_tokens
        return max_length, self.buffer or max(1, max_length // 5)


class DapoConfig(GroupPolicyConfig):
    """Decoupled clip and dynamic sampling (arXiv 2503.14476)."""

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(default=0.28, gt=0)
    overlong: OverlongConfig | None = OverlongConfig()

    filter_metric: str | None = None
    """Groups in which this reward term is the same for all are replaced by others. Default: `reward.eval_term`'s."""

    max_batches: int = Field(default=10, ge=1)
    """Batches of prompts that one step may sample until it has enough informative groups."""


class ReinforcePlusPlusConfig(PolicyConfig):
    """REINFORCE++ (arXiv 2501.03262): discounted returns, whitened over the batch."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""

    kl_reward: KlRewardConfig | None = KlRewardConfig()


class ReinforcePlusPlusBaselineConfig(GroupPolicyConfig):
    """REINFORCE++ with the group's mean as baseline, whitened over the batch (arXiv 2501.03262, section 3)."""

    type: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    kl_loss: KlConfig | None = KlConfig(kind="k2")


class RemaxConfig(PolicyConfig):
    """ReMax: the reward of the greedy completion is the baseline (arXiv 2310.10505)."""

    type: Literal["remax"] = "remax"
    kl_reward: KlRewardConfig | None = KlRewardConfig()


class ActorCriticConfig(PolicyConfig):
    """Algorithms with a critic."""

    critic: CriticConfig = CriticConfig()

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation (arXiv 1506.02438, equation 16)."""

    whiten: bool = True
    """Give a step's advantages mean 0 and standard deviation 1."""


class PpoConfig(ActorCriticConfig):
    """Proximal policy optimisation (arXiv 1707.06347) as RLHF uses it (arXiv 2203.02155)."""

    type: Literal["ppo"] = "ppo"
    kl_reward: KlRewardConfig | None = KlRewardConfig()


class PfPpoConfig(ActorCriticConfig):
    """PPO on completions drawn anew by how far their reward can be believed (arXiv 2409.06957)."""

    baseline_is_group: ClassVar[bool] = True
    type: Literal["pf_ppo"] = "pf_ppo"
    filter: Literal["pow", "max_min", "max_random"] = "pow"
    """How likely a completion is drawn."""

    kl_reward: KlRewardConfig | None = KlRewardConfig()


class ValuePretrainingConfig(Section):
    """Steps of VAPO, before those of `trainer.steps`, in which the critic learns the returns of the policy as it is."""

    max_steps: int = Field(default=50, ge=0)
    """It ends here even where nothing has settled; 0: no pretraining."""

    min_explained_variance: float = Field(default=0.5, le=1)
    """It ends once the critic explains so much of the returns' variance ..."""

    settled: float = Field(default=0.02, gt=0)
    """... and the value loss has changed by less than this share over `window` steps."""

    window: int = Field(default=5, ge=1)


class VapoConfig(ActorCriticConfig):
    """Value-based augmented PPO (arXiv 2504.05118)."""

    type: Literal["vapo"] = "vapo"
    clip_high: float = Field(default=0.28, gt=0)
    length_alpha: float | None = Field(default=0.05, gt=0)
    """The policy's lambda is 1 - 1 / max(length_alpha * length, 1) for each sequence; `lam` is the critic's.
    null: `lam` for both."""

    nll_coefficient: float = Field(default=0.1, ge=0)
    """Factor of the negative log-likelihood of completions with a positive reward."""

    pretraining: ValuePretrainingConfig = ValuePretrainingConfig()


class SafeRlhfConfig(ActorCriticConfig):
    """Safe RLHF (arXiv 2310.12773): reward is raised while the mean cost is held at a limit."""

    type: Literal["safe_rlhf"] = "safe_rlhf"
    cost_term: str = "cost"
    """The term of `reward.terms` that is a cost: no part of the reward, and to be held at `cost_limit`."""

    cost_limit: float = 0.0
    cost_critic: CriticConfig = CriticConfig()

    multiplier_lr: float = Field(default=0.1, ge=0)
    """Of the logarithm of the Lagrange multiplier."""

    multiplier_start: float = Field(default=1.0, gt=0)
    multiplier_max: float = Field(default=5.0, gt=0)
    kl_reward: KlRewardConfig | None = KlRewardConfig()


class PrimeConfig(PolicyConfig):
    """Process reinforcement through implicit rewards (arXiv 2502.01456)."""

    baseline_is_group: ClassVar[bool] = True
    advantages_from: ClassVar[str] = "its reward model and outcomes"
    type: Literal["prime"] = "prime"

    reward_model: CriticConfig = CriticConfig(optimizer=OptimizerConfig(lr=1e-6))
    """The implicit process reward model: a language model, updated in every step. `clip` and `warmup_steps` are not
    used."""

    beta: float = Field(default=0.05, gt=0)
    """Process reward of a token: beta * (log pi_rm - log pi_reference)."""

    process_coefficient: float = Field(default=5.0, ge=0)
    outcome_coefficient: float = Field(default=5.0, ge=0)

    min_accuracy: float = Field(default=0.2, ge=0, le=1)
    """Prompts whose completions are right more rarely are left out ..."""

    max_accuracy: float = Field(default=0.8, ge=0, le=1)
    """... as are those whose are right more often."""

    @model_validator(mode="after")
    def _keeps_something(self) -> PrimeConfig:
        if self.min_accuracy > self.max_accuracy:
            raise ValueError(
                f"min_accuracy needs to be at most max_accuracy, got {self.min_accuracy:g} > {self.max_accuracy:g}: no "
                "prompt would be kept"
            )
        return self

    @property
    def uses_reference(self) -> bool:
        """Always: process rewards measure from it."""
        return True


class DistillationConfig(PolicyConfig):
    """On-policy distillation: each token's advantage is log pi_teacher - log pi (arXiv 2306.13649, reverse KL)."""

    advantages_from: ClassVar[str] = "its teacher"
    type: Literal["distillation"] = "distillation"
    group_size: int = Field(default=1, ge=1)

    teacher: FrozenModelConfig = FrozenModelConfig()
    """The model to learn from; it needs the policy's vocabulary."""

    @model_validator(mode="after")
    def _has_teacher(self) -> DistillationConfig:
        if self.teacher.path is None:
            raise ValueError("teacher.path is required: the model that distillation learns from")
        return self


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
    | Annotated[DistillationConfig, Tag("distillation")],
    by_type("grpo"),
]
"""Discriminated by `type`."""
