"""Fields that all RL algorithms share: batch sizes, policy loss, KL penalties, rollout importance sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from megarl.config.algorithm_presets import Preset, apply_preset
from megarl.config.reward import RewardsConfig
from megarl.config.section import FilePath, Section
from megarl.config.trainer import OptimizerConfig, ParallelConfig


class FrozenModelConfig(Section):
    """A model that is evaluated and never trained."""

    path: FilePath | None = None
    """Folder of the model in Hugging Face format, or a hub id as in `model.path`. Default: `model.path`."""

    parallel: ParallelConfig | None = None
    """Parallel sizes of the model. Default: those of `trainer.parallel`."""


class TrainedModelConfig(FrozenModelConfig):
    """A model that is trained along with the policy."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the model, separate from the policy's."""


class CriticConfig(TrainedModelConfig):
    """A value model that predicts the return still to come, trained along with the policy."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Optimizer of the critic, separate from the policy's."""

    clip: float | None = Field(default=0.5, gt=0)
    """Range of the clipped value loss: a value that has moved further than this from its old value gets no gradient
    away from it. null: no clipping."""

    warmup_steps: int = Field(default=0, ge=0)
    """Number of first steps that train the critic only, not the policy. 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """Declares that an algorithm uses a model in addition to the policy.

    Examples:
            class AnchoredConfig(rl.PolicyConfig):
                anchor: rl.FrozenModelConfig = rl.FrozenModelConfig()

                def models(self) -> tuple[rl.ModelUse, ...]:
                    return (*super().models(), rl.ModelUse(name="anchor", field="anchor", section=self.anchor))
    """

    name: str
    """Unique name within the run: key of `RLRun.models`, prefix of the model's metrics, folder of its checkpoint."""
    field: str
    """Name of the field of the algorithm's section that holds `section`, for error messages."""
    section: FrozenModelConfig
    """Folder, layout and, for a `TrainedModelConfig`, the optimizer of the model."""
    head: Literal["lm", "value"] = "lm"
    """Output layer: language-model logits or one value per token."""
    role: str | None = None
    """Key under `placement` that chooses the model's pool. Default: `name`."""


Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlKind = Literal["k1", "k2", "k3"]


class KlConfig(Section):
    """A KL penalty on the distance between the policy and the reference model."""

    coefficient: float = Field(default=1e-3, ge=0)
    """Factor of the penalty of each token; above 0. To turn the penalty off, set the section to null."""

    kind: KlKind = "k3"
    """Estimator of the KL divergence from d = log pi - log pi_ref (Schulman, 2020): `k1` is d, `k2` is d^2 / 2, `k3` is
    e^-d - 1 + d."""

    @model_validator(mode="after")
    def _check_coefficient(self) -> KlConfig:
        if self.coefficient == 0:
            raise ValueError(
                "coefficient needs to be above 0, got 0: a penalty of 0 would still load a reference model; set the "
                "section to null"
            )
        return self


class KlLossConfig(KlConfig):
    """A KL penalty that is added to the loss."""

    @model_validator(mode="after")
    def _check_kind(self) -> KlLossConfig:
        if self.kind == "k1":
            raise ValueError(
                "kind needs to be k2 or k3, got k1: on samples of the policy the expected gradient of log pi - "
                "log pi_ref is 0, so that as a loss it adds noise and no penalty"
            )
        return self


class KlRewardConfig(KlConfig):
    """A KL penalty that is subtracted from the reward of each token."""

    kind: KlKind = "k1"

    target: float | None = Field(default=None, gt=0)
    """Mean KL per token that an adaptive coefficient aims for (arXiv 1909.08593, section 2.2). Default: the coefficient
    is constant."""

    horizon: int = Field(default=10_000, ge=1)
    """Number of completions over which an adaptive coefficient changes by 20 percent at most."""


class RolloutIsConfig(Section):
    """Rollout importance sampling: corrects for the difference between engine and trainer log-probabilities with the
    ratio pi_trainer,old / pi_rollout.
    """

    kind: Literal["token_tis", "sequence_tis", "icepop", "geometric_mask"] = "token_tis"
    """`token_tis`, `sequence_tis`: multiply the loss by the ratio of each token or sequence, truncated at `high`.
    `icepop`: multiply by the token's ratio, and mask tokens whose ratio is outside [low, high]. `geometric_mask`: mask
    sequences whose geometric mean ratio is outside [low, high]."""

    low: float | None = Field(default=None, ge=0)
    """Lower bound of the ratio. Default: 0.5 for `icepop`, 0.999 for `geometric_mask`, unused otherwise."""

    high: float | None = Field(default=None, gt=0)
    """Upper bound of the ratio. Default: 2 for `token_tis` and `sequence_tis`, 5 for `icepop`, 1.001 for
    `geometric_mask`."""

    @model_validator(mode="after")
    def _check_bounds(self) -> RolloutIsConfig:
        low, high = self.bounds
        if low >= high:
            raise ValueError(f"low needs to be below high, got {low:g} >= {high:g} for {self.kind}")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """`low` and `high`, with the defaults of `kind` filled in."""
        low, high = {"icepop": (0.5, 5.0), "geometric_mask": (0.999, 1.001)}.get(self.kind, (0.0, 2.0))
        return (low if self.low is None else self.low), (high if self.high is None else self.high)


class PolicyConfig(Section):
    """Fields and declarations of every algorithm.

    The configuration of an algorithm outside the package extends this class, or one of those below it.
    """

    needs_group: ClassVar[bool] = False
    """Whether the algorithm compares the completions of one prompt, so that `group_size` needs to be at least 2."""
    needs_greedy_baseline: ClassVar[bool] = False
    """Whether the algorithm compares the completions of a prompt with the greedy one."""
    advantage_source: ClassVar[str] = "rewards"
    """Where advantages come from, as error messages name it. `kl_reward` needs "rewards"."""
    sequence_level: ClassVar[str | None] = None
    """What the algorithm computes over whole sequences, as error messages name it: its episodes need to be one sequence
    each. None: nothing."""
    supports_turn_advantages: ClassVar[bool] = True
    """Whether `advantages_per: turn` can be chosen."""

    type: str
    """Which algorithm: one of megarl's, such as `grpo`, or `package.module:Class`, an algorithm of your own."""

    preset: Preset = "default"
    """Default values of the other fields. `paper`: those of the algorithm's paper. `compat:NAME`: those that reproduce
    the trainer NAME. Fields that the file gives win over the preset."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Number of prompts sampled in one controller step."""

    group_size: int = Field(default=8, ge=1)
    """Number of completions sampled per prompt."""

    num_mini_batches: int = Field(default=1, ge=1)
    """Number of mini-batches, each an optimizer step, that a step's completions are split into. It has to divide
    `prompts_per_step`: the completions of one prompt stay together."""

    ppo_epochs: int = Field(default=1, ge=1)
    """Number of passes over a step's completions."""

    aggregation: Aggregation = "token-mean"
    """How token losses are reduced to one number. All denominators are counted over the whole mini-batch, across
    ranks."""

    length_norm: int | None = Field(default=None, ge=1)
    """Constant number of tokens that `seq-mean-token-sum-norm` divides by. Default: `rollout.max_new_tokens`."""

    advantages_per: Literal["episode", "turn"] = "episode"
    """`turn`: an environment's reward for a turn (`rollout.env`) counts at the end of this turn, for it and earlier
    ones; group baselines compare the same turn of a prompt's episodes. `episode`: rewards count at the end of the
    episode, for all of its tokens."""

    kl_loss: KlLossConfig | None = None
    """KL penalty against the reference model, added to the loss. null: none."""

    kl_reward: KlRewardConfig | None = None
    """KL penalty against the reference model, subtracted from the reward of each token. null: none."""

    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Factor of the entropy bonus: the entropy of the next-token distribution at each sampled token, in nats, times
    this is subtracted from the token's loss. 0: none."""

    mask_truncated_completions: bool = False
    """Leave completions that were truncated at a limit (`finish_reason: length`, `turns`, `seconds` or `calls`) out of
    the policy's loss and its denominators (overlong filtering, arXiv 2503.14476, section 3.4). Their rewards still
    count in baselines and for critics."""

    allow_double_kl: bool = False
    """Allow `kl_loss` and `kl_reward` at the same time. Default: that is an error."""

    reference: FrozenModelConfig = FrozenModelConfig()
    """The reference model of KL penalties, loaded only where the algorithm uses one. Default: the initial policy,
    `model.path`."""

    rollout_is: RolloutIsConfig | None = None
    """Rollout importance sampling, for the difference between engine and trainer log-probabilities. null: none.
    Default: none with `schedule.type: sync`; `token_tis` with the others, whose samples are of older weights."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        kind, given = cls.model_fields["type"].default, data.get("type")
        if not isinstance(kind, str):  # an algorithm of its own, not one derived from a built-in algorithm
            kind = str(given)
        elif isinstance(given, str) and ":" not in given and given != kind:
            raise ValueError(f"type: {cls.__name__} is the configuration of {kind}, got {given!r}")
        for name, why in cls._unused_fields(kind).items():
            if name in data and name not in cls.model_fields:
                raise ValueError(f"{name}: {why}")
        return apply_preset(kind, data.get("preset", "default"), data)

    @classmethod
    def _unused_fields(cls, kind: str) -> dict[str, str]:
        """Return field of another algorithm -> why algorithm `kind` has no such field, and what to do."""
        why = "the completions of a prompt are each other's baseline" if cls.needs_group else "it needs none"
        return {
            "critic": f"{kind} has no critic, {why}; remove the section, or choose ppo",
            "cost_critic": (
                f"{kind} has no costs, so it has no cost critic; remove the section, or choose safe_rlhf"
                if "critic" in cls.model_fields
                else f"{kind} has no critic, {why}; remove the section, or choose ppo"
            ),
            "dual_clip": f"the loss of {kind} has no dual clip; remove it",
            "decoupled": f"the loss of {kind} is not that of PPO; remove the section, or set rollout_is",
            "clip_ratio_low": f"the loss of {kind} has no lower bound of the importance ratio; remove it",
        }

    @model_validator(mode="after")
    def _check_fields(self) -> PolicyConfig:
        if self.prompts_per_step % self.num_mini_batches:
            raise ValueError(
                f"num_mini_batches needs to divide prompts_per_step, got {self.prompts_per_step} % "
                f"{self.num_mini_batches} = {self.prompts_per_step % self.num_mini_batches}"
            )
        if self.needs_group and self.group_size < 2:
            raise ValueError(
                f"group_size needs to be at least 2, got {self.group_size}: {self.type} compares the completions of a "
                "prompt with each other"
            )
        if self.length_norm is not None and self.aggregation != "seq-mean-token-sum-norm":
            raise ValueError(
                "length_norm is the divisor of aggregation seq-mean-token-sum-norm, got length_norm = "
                f"{self.length_norm} with aggregation = {self.aggregation}"
            )
        if self.kl_loss is not None and self.kl_reward is not None and not self.allow_double_kl:
            raise ValueError(
                "kl_loss and kl_reward are both set and would penalize the same divergence twice; set one to null, or "
                "set allow_double_kl: true"
            )
        if self.kl_reward is not None and self.advantage_source != "rewards":
            raise ValueError(
                f"kl_reward is subtracted from rewards, but the advantages of {self.type} come from "
                f"{self.advantage_source}; set kl_reward to null, or use kl_loss"
            )
        if self.advantages_per == "turn" and not self.supports_turn_advantages:
            raise ValueError(
                f"advantages_per needs to be episode, got turn: the advantages of {self.type} come from "
                f"{self.advantage_source}"
            )
        for name in ("path", "parallel"):
            if getattr(self.reference, name) is not None and not self.uses_reference:
                raise ValueError(
                    f"reference.{name} is set, but no reference model is used: kl_loss and kl_reward are null; remove "
                    "it, or set one of them"
                )
        return self

    @property
    def uses_reference(self) -> bool:
        """Whether the run needs a reference model."""
        return self.kl_loss is not None or self.kl_reward is not None

    @property
    def refuses_forks(self) -> str | None:
        """Why an episode needs to be one sequence, as the end of a sentence; None: it may have forked segments."""
        if self.sequence_level is not None:
            return f"algorithm.type: {self.type} computes {self.sequence_level} over whole sequences"
        if self.rollout_is is not None and self.rollout_is.kind in ("sequence_tis", "geometric_mask"):
            return f"algorithm.rollout_is.kind: {self.rollout_is.kind} computes weights over whole sequences"
        return None

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per controller step."""
        return self.num_mini_batches * self.ppo_epochs

    def models(self) -> tuple[ModelUse, ...]:
        """Return the models that the algorithm uses in addition to the policy."""
        if not self.uses_reference:
            return ()
        return (ModelUse(name="reference", field="reference", section=self.reference),)

    @property
    def cost_terms(self) -> frozenset[str]:
        """Names of the terms of `reward.terms` that are costs, not part of the reward."""
        return frozenset()

    def terms_of_every_completion(self, reward: RewardsConfig) -> frozenset[str]:
        """Return the names of the terms that the algorithm looks at, whatever source a completion is from."""
        return self.cost_terms

    @property
    def pretraining_steps(self) -> int:
        """Largest number of steps that train critics before the first step of `trainer.steps`."""
        return 0

    def check_rewards(self, reward: RewardsConfig) -> None:
        """Check the fields that name terms of `reward`.

        Raises:
            ValueError: a field does not fit; the message begins with the field's path, `algorithm.<field>`.
        """


class ClipRatioConfig(PolicyConfig):
    """Fields of algorithms whose policy loss clips the importance ratio on both sides."""

    clip_ratio_low: float = Field(default=0.2, gt=0)
    """The importance ratio is clipped below at 1 - clip_ratio_low."""

    clip_ratio_high: float = Field(default=0.2, gt=0)
    """The importance ratio is clipped above at 1 + clip_ratio_high."""

    @model_validator(mode="after")
    def _check_clip_ratio_low(self) -> ClipRatioConfig:
        if self.clip_ratio_low >= 1:
            raise ValueError(f"clip_ratio_low needs to be below 1, got {self.clip_ratio_low:g}: ratios are positive")
        return self


class DecoupledConfig(Section):
    """Decoupled PPO (arXiv 2110.00641), for samples of older policies: the loss clips the ratio to pi_old, the policy
    at the start of the step, and is multiplied by pi_old / pi_rollout; pi_rollout has sampled the token.
    """

    behave_cap: float | None = Field(default=None, gt=0)
    """Upper bound of pi_old / pi_rollout. Default: no bound."""


class ClippedPolicyConfig(ClipRatioConfig):
    """Fields of algorithms with the policy loss of PPO."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of tokens with a negative advantage A at -dual_clip * A (arXiv 1912.09729). Default: no bound."""

    decoupled: DecoupledConfig | None = None
    """The loss of decoupled PPO, instead of `rollout_is`. Default: off."""

    @model_validator(mode="after")
    def _check_decoupled(self) -> ClippedPolicyConfig:
        if self.decoupled is not None and self.rollout_is is not None:
            raise ValueError(
                "decoupled and rollout_is are both set and would multiply the loss by the same ratio twice; set one to "
                "null"
            )
        return self
