"""Conversion of verl's keys of advantages, policy loss, KL penalties and rollout correction."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megarl.importing.tables import NotConvertible, Refused, Settings

ACTOR = "actor_rollout_ref.actor"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
ESTIMATOR = "algorithm.adv_estimator"
CORRECTION = "algorithm.rollout_correction"

ESTIMATORS: Mapping[str, str] = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
"""verl's advantage estimator -> megarl's algorithm."""

LOSS_MODES: Mapping[str, str] = {"gspo": "gspo", "cispo": "cispo", "geo_mean": "gmpo"}
"""verl's loss mode with the advantages of GRPO -> megarl's algorithm."""

OWN_AGGREGATION = ("gspo", "gmpo")
"""Algorithms whose loss mode takes seq-mean-token-mean in verl, whatever `loss_agg_mode` is."""

WHITENED = ("ppo", "pf_ppo", "reinforce_pp", "reinforce_pp_baseline")

KL_KINDS: Mapping[str, str] = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def algorithm_type(s: Settings) -> str:
    """Return `algorithm.type`.

    Raises:
        Refused: megarl has no such estimator or loss, or not the two together.
    """
    estimator, mode = s.text(ESTIMATOR) or "gae", s.text(LOSS_MODE) or "vanilla"
    if estimator not in ESTIMATORS:
        raise Refused(ESTIMATOR, f"megarl has no estimator {estimator}; it has {', '.join(ESTIMATORS)}")
    kind = ESTIMATORS[estimator]
    if kind == "grpo" and not s.flag("algorithm.norm_adv_by_std_in_grpo"):
        kind = "dr_grpo"
    if mode == "vanilla":
        if kind == "ppo" and s.flag("algorithm.use_pf_ppo"):
            return "pf_ppo"
        return "dapo" if kind == "grpo" and s.flag("algorithm.filter_groups.enable") else kind
    if mode not in LOSS_MODES:
        raise Refused(LOSS_MODE, f"megarl has no policy loss {mode}; it has vanilla, {', '.join(LOSS_MODES)}")
    if kind != "grpo":
        raise Refused(
            LOSS_MODE, f"megarl has {mode} with the advantages of GRPO, divided by the standard deviation, only"
        )
    return LOSS_MODES[mode]


def convert_type(s: Settings) -> Mapping[str, object]:
    """Return the algorithm, with what verl does in all of its runs."""
    kind = algorithm_type(s)
    values: dict[str, object] = {"algorithm.type": kind}
    if kind in WHITENED:
        values["algorithm.whiten_unbiased"] = True
    return values


def convert_clip_ratios(s: Settings) -> Mapping[str, object]:
    """Return the bounds of the ratio, or of its logarithm for GMPO."""
    kind = algorithm_type(s)
    low, high = (s.number(f"{ACTOR}.clip_ratio_{side}") or s.number(f"{ACTOR}.clip_ratio") for side in ("low", "high"))
    if kind == "cispo":
        return {"algorithm.clip_ratio_high": high}
    name = "clip_log_ratio" if kind == "gmpo" else "clip_ratio"
    return {f"algorithm.{name}_low": low, f"algorithm.{name}_high": high}


def convert_dual_clip(s: Settings) -> Mapping[str, object]:
    """Return the bound of losses of negative advantages, where the loss has one."""
    kind = algorithm_type(s)
    return {} if kind in LOSS_MODES.values() else {"algorithm.dual_clip": s.number(f"{ACTOR}.clip_ratio_c")}


def convert_aggregation(s: Settings) -> Mapping[str, object]:
    """Return how token losses become one number."""
    if algorithm_type(s) in OWN_AGGREGATION:
        return {"algorithm.aggregation": "seq-mean-token-mean"}
    mode = s.text(f"{ACTOR}.loss_agg_mode") or "token-mean"
    known = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    if mode not in known:
        raise Refused(f"{ACTOR}.loss_agg_mode", f"megarl has no aggregation {mode}; it has {', '.join(known)}")
    scale = s.whole(f"{ACTOR}.loss_scale_factor")
    if mode != "seq-mean-token-sum-norm" or scale is None:
        return {"algorithm.aggregation": mode}
    return {"algorithm.aggregation": mode, "algorithm.length_norm": scale}


def convert_kl_loss(s: Settings) -> Mapping[str, object]:
    """Return the KL penalty in the loss, or null."""
    coefficient, kind = s.number(f"{ACTOR}.kl_loss_coef"), s.text(f"{ACTOR}.kl_loss_type") or "low_var_kl"
    if not s.flag(f"{ACTOR}.use_kl_loss") or not coefficient:
        return {"algorithm.kl_loss": None}
    if kind.endswith("+"):  # its gradient is that of k2, whatever its value is
        return {"algorithm.kl_loss": {"kind": "k2", "coefficient": coefficient}}
    if KL_KINDS.get(kind, "k1") == "k1":
        raise NotConvertible(
            f"megarl has k2 (mse) and k3 (low_var_kl) in the loss, not {kind}: the expected gradient of k1 is 0; "
            "kl_loss is null",
            {"algorithm.kl_loss": None},
        )
    return {"algorithm.kl_loss": {"kind": KL_KINDS[kind], "coefficient": coefficient}}


def convert_kl_reward(s: Settings) -> Mapping[str, object]:
    """Return the KL penalty in the rewards, or null."""
    coefficient, kind = s.number("algorithm.kl_ctrl.kl_coef"), s.text("algorithm.kl_penalty") or "kl"
    if not s.flag("algorithm.use_kl_in_reward") or not coefficient:
        return {"algorithm.kl_reward": None}
    base = kind.removesuffix("+")  # straight-through variants have the same value
    if base not in KL_KINDS:
        raise NotConvertible(
            f"megarl has kl, mse and low_var_kl in rewards, not {kind}; kl_reward is null",
            {"algorithm.kl_reward": None},
        )
    penalty: dict[str, object] = {"kind": KL_KINDS[base], "coefficient": coefficient}
    if s.text("algorithm.kl_ctrl.type") == "adaptive":
        penalty["target"] = s.number("algorithm.kl_ctrl.target_kl")
        penalty["horizon"] = s.whole("algorithm.kl_ctrl.horizon")
    values: dict[str, object] = {"algorithm.kl_reward": penalty}
    if s.flag(f"{ACTOR}.use_kl_loss") and s.number(f"{ACTOR}.kl_loss_coef"):
        values["algorithm.allow_double_kl"] = True
    return values


def convert_returns(s: Settings) -> Mapping[str, object]:
    """Return gamma and lambda of the estimators that have them."""
    gamma, lam = s.number("algorithm.gamma"), s.number("algorithm.lam")
    match algorithm_type(s):
        case "ppo" | "pf_ppo":
            return {"algorithm.gamma": gamma, "algorithm.lam": lam}
        case "reinforce_pp":
            return {"algorithm.gamma": gamma}
    return {}


def convert_filter_groups(s: Settings) -> Mapping[str, object]:
    """Return dynamic sampling: DAPO's, or by pass rate with another algorithm."""
    if not s.flag("algorithm.filter_groups.enable"):
        return {}
    batches = s.whole("algorithm.filter_groups.max_num_gen_batches")
    kind = algorithm_type(s)
    if kind == "dapo":
        return {"algorithm.max_batches": batches} if batches else {}
    if kind not in ("dr_grpo", "gspo", "cispo", "gmpo", "rloo"):
        raise NotConvertible(f"megarl replaces groups without a signal for algorithms with a group, not for {kind}")
    rates = {"data.difficulty.min_pass_rate": 1e-6, "data.difficulty.max_pass_rate": 1 - 1e-6}
    return {**rates, "data.difficulty.max_batches": batches} if batches else rates


def overlong_keys() -> list[str]:
    """Return the keys of DAPO's penalty on long completions, which versions name differently."""
    heads = ("reward_model", "reward_model.reward_kwargs", "reward.reward_kwargs", "reward.reward_manager")
    buffers = [f"{head}.{name}" for head in heads for name in ("overlong_buffer", "overlong_buffer_cfg")]
    return [f"{buffer}.{name}" for buffer in buffers for name in ("enable", "len", "penalty_factor")]


def convert_overlong(s: Settings) -> Mapping[str, object]:
    """Return DAPO's penalty on long completions."""
    given = {key.rpartition(".")[2]: key for key in overlong_keys() if s.is_given(key)}
    is_dapo = algorithm_type(s) == "dapo"
    if not given or ("enable" in given and not s.flag(given["enable"])):
        return {"algorithm.overlong": None} if is_dapo else {}
    if not is_dapo:
        raise NotConvertible(
            "the penalty on long completions is part of megarl's dapo, which needs filter_groups.enable; a reward "
            "function of yours can subtract it: it knows the number of tokens"
        )
    values: dict[str, object] = {}
    if "len" in given:
        values["algorithm.overlong.buffer"] = s.whole(given["len"])
    values["algorithm.overlong.factor"] = s.number(given["penalty_factor"]) if "penalty_factor" in given else 1.0
    for head in ("reward_model.reward_kwargs", "reward.reward_kwargs"):
        if length := s.whole(f"{head}.max_resp_len"):
            values["algorithm.overlong.max_length"] = length
    return values


def convert_rollout_correction(s: Settings) -> Mapping[str, object]:
    """Return the weights or masks for the difference between engine and trainer, or null."""
    if (cap := s.number(f"{ACTOR}.tis_imp_ratio_cap")) and cap > 0:  # versions up to 0.5
        return _importance("token_tis", high=cap)
    weights, reject = s.text(f"{CORRECTION}.rollout_is"), s.text(f"{CORRECTION}.rollout_rs")
    threshold = s.value(f"{CORRECTION}.rollout_is_threshold")
    if s.is_given("algorithm.rollout_is") or s.is_given("algorithm.rollout_is_threshold"):  # version 0.6
        weights = s.text("algorithm.rollout_is_level") or "token"
        threshold = s.value("algorithm.rollout_is_threshold")
        if threshold is None or str(s.value("algorithm.rollout_is")).lower() == "false":
            weights = None
    if weights in (None, "null") and reject in (None, "null"):
        return {} if bypasses(s) else {"algorithm.rollout_is": None}
    if weights not in (None, "null") and reject not in (None, "null"):
        reason = f"megarl has weights or masks, not both; algorithm.rollout_is has the weights of rollout_is: {weights}"
        raise NotConvertible(
            reason, _convert_weights(str(weights), threshold), by_key={f"{CORRECTION}.rollout_rs": reason}
        )
    if weights not in (None, "null"):
        return _convert_weights(str(weights), threshold)
    low, high = _bounds(s.value(f"{CORRECTION}.rollout_rs_threshold"))
    if reject != "seq_mean_k1" or high is None:
        raise NotConvertible(
            f"megarl masks sequences by the mean log-ratio (seq_mean_k1 with a threshold), not by {reject}; rollout_is "
            "is null",
            {"algorithm.rollout_is": None},
        )
    return _importance("geometric_mask", low=1 / high if low is None else low, high=high)


def bypasses(s: Settings) -> bool:
    """Whether verl takes the engine's log-probabilities as those of the old policy."""
    is_default = any(s.matching("async_training.*"))
    return s.flag(f"{CORRECTION}.bypass_mode") if s.is_given(f"{CORRECTION}.bypass_mode") else is_default


def _convert_weights(level: str, threshold: object) -> Mapping[str, object]:
    low, high = _bounds(threshold)
    if level not in ("token", "sequence"):
        raise NotConvertible(f"rollout_is needs token or sequence, got {level}", {"algorithm.rollout_is": None})
    if low is None:
        return _importance(f"{level}_tis", high=high or 2.0)
    if level == "token":
        return _importance("icepop", low=low, high=high)
    raise NotConvertible(
        "megarl masks tokens outside of two bounds (icepop), not sequences; rollout_is has the upper bound",
        _importance("sequence_tis", high=high),
    )


def _importance(kind: str, *, low: float | None = None, high: float | None) -> Mapping[str, object]:
    section = {"kind": kind, "low": low, "high": high}
    return {"algorithm.rollout_is": {name: value for name, value in section.items() if value is not None}}


def _bounds(threshold: object) -> tuple[float | None, float | None]:
    """Return the lower and upper bound of `2.0` or `0.5_2.0`."""
    parts = str(threshold).split("_") if threshold is not None else []
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        return None, None
    if not numbers or not all(map(math.isfinite, numbers)):
        return None, None
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
