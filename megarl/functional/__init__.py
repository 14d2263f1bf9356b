"""Pure tensor functions of RL and preference training: advantages, losses, KL, filters. Each one cites its source."""

from megarl.functional.advantages import (
    discounted_returns,
    gae,
    group_advantages,
    length_adaptive_lambda,
    normalize,
    remax_advantages,
    spread_completions,
    whiten,
)
from megarl.functional.correction import CorrectionOutput, rollout_correction
from megarl.functional.filters import keep_informative_groups, overlong_penalty, pf_ppo_resample, pf_ppo_weights
from megarl.functional.kl import AdaptiveKl, kl_penalty
from megarl.functional.lagrangian import LagrangeMultiplier, safe_rlhf_advantages
from megarl.functional.losses import (
    Denominators,
    PolicyLossOutput,
    ValueLossOutput,
    aggregate,
    cispo_loss,
    clipped_policy_loss,
    decoupled_policy_loss,
    gmpo_loss,
    gspo_loss,
    value_loss,
)
from megarl.functional.moments import GroupMoments
from megarl.functional.preference_losses import PreferenceLossOutput, dpo_loss, preference_loss, rpo_loss
from megarl.functional.process_rewards import implicit_reward_loss, prime_rewards
from megarl.functional.sequences import Sequences
from megarl.functional.turn_advantages import turn_advantages, turn_of_tokens, turn_returns

__all__ = [
    "AdaptiveKl",
    "CorrectionOutput",
    "Denominators",
    "GroupMoments",
    "LagrangeMultiplier",
    "PolicyLossOutput",
    "PreferenceLossOutput",
    "Sequences",
    "ValueLossOutput",
    "aggregate",
    "cispo_loss",
    "clipped_policy_loss",
    "decoupled_policy_loss",
    "discounted_returns",
    "dpo_loss",
    "gae",
    "gmpo_loss",
    "group_advantages",
    "gspo_loss",
    "implicit_reward_loss",
    "keep_informative_groups",
    "kl_penalty",
    "length_adaptive_lambda",
    "normalize",
    "overlong_penalty",
    "pf_ppo_resample",
    "pf_ppo_weights",
    "preference_loss",
    "prime_rewards",
    "remax_advantages",
    "rollout_correction",
    "rpo_loss",
    "safe_rlhf_advantages",
    "spread_completions",
    "turn_advantages",
    "turn_of_tokens",
    "turn_returns",
    "value_loss",
    "whiten",
]
