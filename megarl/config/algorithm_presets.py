"""Presets: values of an algorithm's fields according to its paper or to another trainer.

Presets do not set the policy's learning rate, batch sizes or group sizes. The values of a trainer are its defaults, or
those of the recipe that it ships for the algorithm. Differences that no field can express are in comments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megarl.config.section import merge

Preset = Literal["default", "paper", "compat:verl", "compat:slime", "compat:nemo-rl"]

# verl, utils/torch_functional.py: masked_whiten divides by n - 1; so does slime, utils/distributed_utils.py
_UNBIASED: dict[str, object] = {"whiten_unbiased": True}

# verl, trainer/config/actor/actor.yaml: clip_ratio_low/high 0.2, clip_ratio_c 3, loss_agg_mode token-mean
_VERL: dict[str, object] = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "dual_clip": 3.0,
    "aggregation": "token-mean",
}

# slime, utils/arguments.py: kl-coef and kl-loss-coef 0; without calculate-per-token-loss it takes the mean of each
# sample's mean
_SLIME_LOSS: dict[str, object] = {"aggregation": "seq-mean-token-mean", "kl_loss": None, "kl_reward": None}

# eps-clip 0.2, no eps-clip-c
_SLIME: dict[str, object] = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "dual_clip": None,
    **_SLIME_LOSS,
}

# NeMo-RL, examples/configs/recipes/llm/dapo-qwen2.5-7b.v2.yaml and ppo_math_1B.yaml, under loss_fn
_NEMO_DAPO: dict[str, object] = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28,
    "dual_clip": 10.0,
    "aggregation": "token-mean",
    "kl_loss": None,
    "kl_reward": None,
}

# PKU-Alignment/safe-rlhf, scripts/ppo-lag.sh: clip_range_value 5, critic_lr and cost_critic_lr 5e-6
_SAFE_RLHF_CRITIC: dict[str, object] = {"clip": 5.0, "optimizer": {"lr": 5e-6}}

PRESETS: dict[tuple[str, str], dict[str, object]] = {
    # arXiv 2402.03300: coefficient 0.04 (section 4.2), estimator k3 (equation 4), mean of means (equation 3)
    ("grpo", "paper"): {"kl_loss": {"kind": "k3", "coefficient": 0.04}, "aggregation": "seq-mean-token-mean"},
    # docs/algo/grpo.md asks for use_kl_loss: low_var_kl with kl_loss_coef 0.001 by default
    ("grpo", "compat:verl"): {**_VERL, "kl_loss": {"kind": "k3", "coefficient": 0.001}, "kl_reward": None},
    ("grpo", "compat:slime"): _SLIME,
    # arXiv 2503.20783, section 3.2; sail-sg/understand-r1-zero: beta 0, constant_normalizer generate_max_length
    ("dr_grpo", "paper"): {"aggregation": "seq-mean-token-sum-norm", "kl_loss": None, "kl_reward": None},
    # docs/algo/grpo.md, "DrGRPO"
    ("dr_grpo", "compat:verl"): {
        **_VERL,
        "aggregation": "seq-mean-token-sum-norm",
        "kl_loss": None,
        "kl_reward": None,
    },
    # --disable-grpo-std-normalization; the mean over a sample's length stays
    ("dr_grpo", "compat:slime"): _SLIME,
    # use_kl_in_reward false by default
    ("rloo", "compat:verl"): {**_VERL, "kl_loss": None, "kl_reward": None},
    # arXiv 2507.18071, section 5.1
    ("gspo", "paper"): {
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "aggregation": "seq-mean-token-mean",
        "kl_loss": None,
        "kl_reward": None,
    },
    # examples/gspo_trainer/test_gspo_3b_math.sh; the loss mode gspo has no dual clip
    ("gspo", "compat:verl"): {
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "aggregation": "seq-mean-token-mean",
        "kl_loss": None,
        "kl_reward": None,
    },
    # tests/test_moonlight_16B_A3B.py: --eps-clip 4e-4, which is both sides'
    ("gspo", "compat:slime"): {**_SLIME_LOSS, "clip_ratio_low": 4e-4, "clip_ratio_high": 4e-4},
    # arXiv 2506.13585, section 3.1: the token loss of DAPO, no penalty, no lower bound; it names no upper one
    ("cispo", "paper"): {"aggregation": "token-mean", "kl_loss": None, "kl_reward": None},
    # examples/cispo_trainer/run_cispo_qwen2_5_0_5b_gsm8k.sh; its clip_ratio_low 10 is no bound
    ("cispo", "compat:verl"): {
        "clip_ratio_high": 0.2,
        "aggregation": "token-mean",
        "kl_loss": {"kind": "k3", "coefficient": 0.001},
        "kl_reward": None,
    },
    # utils/arguments.py advises --eps-clip 1 --eps-clip-high 4; its default of 0.2 would keep a lower bound
    ("cispo", "compat:slime"): {**_SLIME_LOSS, "clip_ratio_high": 4.0},
    # arXiv 2507.20673, section 4.1; callsys/GMPO, scripts/qwen2.5-math-7b-gmpo.sh: beta 0, critic_type grpo
    ("gmpo", "paper"): {
        "clip_log_ratio_low": 0.4,
        "clip_log_ratio_high": 0.4,
        "aggregation": "seq-mean-token-mean",
        "kl_loss": None,
        "kl_reward": None,
    },
    # examples/gmpo_trainer/run_qwen2_5-7b_math.sh; the loss mode geo_mean aggregates in its own way, which is this
    ("gmpo", "compat:verl"): {
        "clip_log_ratio_low": 0.4,
        "clip_log_ratio_high": 0.4,
        "aggregation": "seq-mean-token-mean",
        "kl_loss": None,
        "kl_reward": None,
    },
    # arXiv 2503.14476, section 4.1; for rewards of -1 and 1
    ("dapo", "paper"): {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "aggregation": "token-mean",
        "kl_loss": None,
        "kl_reward": None,
        "overlong": {"max_length": 20_480, "buffer": 4096, "factor": 1.0},
    },
    # docs/algo/dapo.md: overlong_buffer, max_num_gen_batches; clip_ratio_c 10 as in the shipped dapo_7b_math scripts
    ("dapo", "compat:verl"): {
        **_VERL,
        "clip_ratio_high": 0.28,
        "dual_clip": 10.0,
        "kl_loss": None,
        "kl_reward": None,
        "overlong": {"max_length": 20_480, "buffer": 4096, "factor": 1.0},
        "max_batches": 10,
    },
    # dapo-qwen2.5-7b.v2.yaml, whose reward_scaling makes rewards -1 and 1; grpo_math_1B.yaml: 10 batches
    ("dapo", "compat:nemo-rl"): {
        **_NEMO_DAPO,
        "overlong": {"max_length": 14_336, "buffer": 2048, "factor": 1.0},
        "max_batches": 10,
    },
    # trainer/config/ppo_trainer.yaml: gamma 1, use_kl_in_reward false; slime requires --normalize-advantages for both
    ("reinforce_pp", "compat:verl"): {**_VERL, **_UNBIASED, "gamma": 1.0, "kl_loss": None, "kl_reward": None},
    ("reinforce_pp", "compat:slime"): {**_SLIME, **_UNBIASED, "gamma": 1.0},
    ("reinforce_pp_baseline", "compat:verl"): {**_VERL, **_UNBIASED, "kl_loss": None, "kl_reward": None},
    ("reinforce_pp_baseline", "compat:slime"): {**_SLIME, **_UNBIASED},
    ("remax", "compat:verl"): {**_VERL, "kl_loss": None, "kl_reward": None},
    # trainer/config/ppo_trainer.yaml: lam 1, gamma 1, use_kl_in_reward false; GAE always whitens;
    # critic/critic.yaml: lr 1e-5, cliprange_value 0.5
    ("ppo", "compat:verl"): {
        **_VERL,
        "gamma": 1.0,
        "lam": 1.0,
        "whiten": True,
        **_UNBIASED,
        "kl_loss": None,
        "kl_reward": None,
        "critic": {"clip": 0.5, "optimizer": {"lr": 1e-5}},
    },
    # gamma 1, lambd 1, no normalize-advantages, value-clip 0.2; its value loss is twice ours, which Adam does not mind
    ("ppo", "compat:slime"): {**_SLIME, "gamma": 1.0, "lam": 1.0, "whiten": False, "critic": {"clip": 0.2}},
    # ppo_math_1B.yaml; its value loss is 0.4 of ours, and its overlong penalty is a reward's business; whitening of
    # algorithms/advantage_estimator.py divides by n - 1
    ("ppo", "compat:nemo-rl"): {
        **_NEMO_DAPO,
        "ppo_epochs": 4,
        "gamma": 1.0,
        "lam": 0.95,
        "whiten": True,
        **_UNBIASED,
        "critic": {"clip": 0.2},
    },
    # arXiv 2504.05118: critic's lambda 1 and alpha 0.05 (section 4), mu 0.1, epsilon and critic lr (section 5.1)
    ("vapo", "paper"): {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "aggregation": "token-mean",
        "kl_loss": None,
        "kl_reward": None,
        "gamma": 1.0,
        "lam": 1.0,
        "length_alpha": 0.05,
        "nll_coefficient": 0.1,
        "critic": {"optimizer": {"lr": 2e-6}},
    },
    # arXiv 2502.01456; PRIME-RL/PRIME, training/examples/run_prime_main.sh: beta_train, rm_coef, reward_coef,
    # accuracy bounds, optim.lr and grad_clip of the prime_model, kl_coef 0; scale and whitening of its advantages are
    # those of the authors' code in verl, recipe/prime/prime_core_algos.py, and not in the paper
    ("prime", "paper"): {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "aggregation": "token-mean",
        "kl_loss": None,
        "kl_reward": None,
        "beta": 0.05,
        "process_coefficient": 5.0,
        "outcome_coefficient": 5.0,
        "scale_process": True,
        "whiten": True,
        **_UNBIASED,
        "min_accuracy": 0.2,
        "max_accuracy": 0.8,
        "reward_model": {"optimizer": {"lr": 1e-6, "clip_grad": 10.0}},
    },
    # arXiv 2310.12773; safe-rlhf, scripts/ppo-lag.sh: kl_coeff, clip_range_ratio, gae_lambda, lambda_init/lr/max,
    # threshold; masked_mean takes the mean of each sample's mean
    ("safe_rlhf", "paper"): {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "aggregation": "seq-mean-token-mean",
        "kl_loss": None,
        "kl_reward": {"kind": "k1", "coefficient": 0.01},
        "gamma": 1.0,
        "lam": 0.95,
        "whiten": False,
        "critic": _SAFE_RLHF_CRITIC,
        "cost_critic": _SAFE_RLHF_CRITIC,
        "cost_limit": 0.0,
        "multiplier_lr": 0.1,
        "multiplier_start": 1.0,
        "multiplier_max": 5.0,
    },
}
"""(type, preset) -> default values of fields."""


def apply_preset(kind: str, preset: str, given: Mapping[str, object]) -> dict[str, object]:
    """Merge `given` over the values of the preset. Sections are merged key by key; a null in `given` wins.

    Raises:
        ValueError: the algorithm has no such preset.
    """
    if preset == "default":
        return dict(given)
    values = PRESETS.get((kind, preset))
    if values is None:
        has = ["default", *(name for of, name in PRESETS if of == kind)]
        raise ValueError(f"preset: {kind} has the presets {', '.join(has)}, got {preset!r}")
    return merge(values, given)
