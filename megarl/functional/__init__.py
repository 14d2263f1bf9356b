"""Pure tensor functions; each cites its source."""

from megarl.algorithms.advantages import (
    discounted_returns,
    gae,
    group_advantages,
    length_adaptive_lambda,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    whiten,
)
from megarl.algorithms.correction import Correction, rollout_correction
from megarl.algorithms.filters import keep_informative_groups, overlong_penalty, pf_ppo_resample, pf_ppo_weights
from megarl.algorithms.kl import AdaptiveKl, kl_penalty
from megarl.algorithms.losses import (
    Denominators,
    PolicyLoss,
    ValueLoss,
    aggregate,
    cispo_loss,
    clipped_policy_loss,
    decoupled_policy_loss,
    gmpo_loss,
    gspo_loss,
    value_loss,
)
from megarl.algorithms.preferences import PreferenceLoss, dpo_loss, preference_loss, rpo_loss
from megarl.algorithms.process_rewards import implicit_reward_loss, prime_rewards
from megarl.algorithms.safe_rlhf import LagrangeMultiplier, safe_rlhf_advantages
from megarl.algorithms.sequences import Sequences

__all__ = [
    "AdaptiveKl",
    "Correction",
    "Denominators",
    "LagrangeMultiplier",
    "PolicyLoss",
    "PreferenceLoss",
    "Sequences",
    "ValueLoss",
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
    "overlong_penalty",
    "pf_ppo_resample",
    "pf_ppo_weights",
    "preference_loss",
    "prime_rewards",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "remax_advantages",
    "rollout_correction",
    "rpo_loss",
    "safe_rlhf_advantages",
    "value_loss",
    "whiten",
]
