"""Conversion of NeMo-RL's keys that are not copied as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megarl.config.engine_options import find_option_problems
from megarl.config.megatron import Part, find_field_problems
from megarl.importing.tables import NotConvertible, Refused, Settings

MEGATRON = "policy.megatron_cfg"
DTENSOR = "policy.dtensor_cfg"
GENERATION = "policy.generation"
TRUNCATED = "loss_fn.truncated_importance_sampling"
NO_BOUND = 1e9
"""Upper bound of weights that are not truncated."""


def head(s: Settings) -> str:
    """Return the section of the algorithm: grpo or ppo."""
    return "ppo" if any(key.startswith("ppo.") for key in s.given) else "grpo"


def estimator(s: Settings, name: str) -> str:
    """Return the key of the advantage estimator's setting `name`."""
    return f"{head(s)}.adv_estimator.{name}"


def _grpo_flag(s: Settings, name: str) -> bool:
    own, older = estimator(s, name), f"grpo.{name}"
    return s.flag(own) if s.is_given(own) else s.flag(older)


def uses_megatron(s: Settings) -> bool:
    """Whether Megatron trains, and not DTensor."""
    return s.flag(f"{MEGATRON}.enabled")


def algorithm_type(s: Settings) -> str:
    """Return `algorithm.type`.

    Raises:
        Refused: megarl has no such estimator, or not with this loss.
    """
    name, key = s.text(estimator(s, "name")) or "grpo", estimator(s, "name")
    is_sequence, is_cispo = s.flag("loss_fn.sequence_level_importance_ratios"), s.flag("loss_fn.use_cispo")
    if name == "gae":
        return "vapo" if (s.number(estimator(s, "length_adaptive_alpha")) or 0) > 0 else "ppo"
    if name == "reinforce_plus_plus":
        kind = "reinforce_pp_baseline" if s.flag(estimator(s, "minus_baseline")) else "reinforce_pp"
        if is_sequence or is_cispo:
            raise Refused(key, "megarl has gspo and cispo with the advantages of GRPO only")
        return kind
    if name != "grpo":
        raise Refused(key, f"megarl has no estimator {name}; it has grpo, reinforce_plus_plus and gae")
    by_std, leave_out = _grpo_flag(s, "normalize_rewards"), _grpo_flag(s, "use_leave_one_out_baseline")
    if is_sequence or is_cispo:
        if not by_std:
            raise Refused(
                "grpo.normalize_rewards", "megarl divides the advantages of gspo and cispo by the group's std"
            )
        return "gspo" if is_sequence else "cispo"
    if not by_std:
        return "rloo" if leave_out else "dr_grpo"
    return "dapo" if s.flag("grpo.use_dynamic_sampling") else "grpo"


def convert_type(s: Settings) -> Mapping[str, object]:
    """Return the algorithm, with what NeMo-RL does with its advantages."""
    kind = algorithm_type(s)
    values: dict[str, object] = {"algorithm.type": kind}
    if kind == "dapo" and not s.flag("grpo.reward_shaping.enabled"):
        values["algorithm.overlong"] = None
    if kind in ("ppo", "vapo"):
        values["algorithm.whiten"] = s.flag(estimator(s, "normalize_advantages"))
        values["algorithm.whiten_unbiased"] = True
    if kind == "vapo":
        values["algorithm.pretraining.max_steps"] = 0
    if kind == "reinforce_pp":
        values["algorithm.gamma"] = 1.0
    if kind in ("grpo", "dapo", "gspo", "cispo") and _grpo_flag(s, "use_leave_one_out_baseline"):
        raise NotConvertible(
            "megarl's baseline and standard deviation are those of all completions of the group, not of the others; "
            "without normalize_rewards it is rloo",
            values,
        )
    return values


def convert_dynamic_sampling(s: Settings) -> Mapping[str, object]:
    """Return the replacement of groups without a signal: DAPO's, or by pass rate with another algorithm."""
    if not s.flag("grpo.use_dynamic_sampling"):
        return {}
    kind, batches = algorithm_type(s), s.whole("grpo.dynamic_sampling_max_gen_batches")
    if kind == "dapo":
        return {} if batches is None else {"algorithm.max_batches": batches}
    if kind not in ("dr_grpo", "rloo", "gspo", "cispo"):
        raise NotConvertible(f"megarl replaces groups without a signal for algorithms with a group, not for {kind}")
    rates = {"data.difficulty.min_pass_rate": 1e-6, "data.difficulty.max_pass_rate": 1 - 1e-6}
    return rates if batches is None else {**rates, "data.difficulty.max_batches": batches}


def convert_clip(s: Settings) -> Mapping[str, object]:
    """Return the bounds of the ratio."""
    low, high = s.number("loss_fn.ratio_clip_min") or 0.0, s.number("loss_fn.ratio_clip_max")
    if algorithm_type(s) != "cispo":
        return {"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": high}
    values = {"algorithm.clip_ratio_high": high}
    if low < 1:
        raise NotConvertible(f"megarl's cispo has no lower bound, which is {1 - low:g} here", values)
    return values


def convert_dual_clip(s: Settings) -> Mapping[str, object]:
    """Return the bound of losses of negative advantages."""
    bound, kind = s.number("loss_fn.ratio_clip_c"), algorithm_type(s)
    if bound is None:
        return {}
    if kind in ("gspo", "cispo"):
        raise NotConvertible(f"megarl's {kind} has no dual clip")
    return {"algorithm.dual_clip": bound}


def convert_kl_loss(s: Settings) -> Mapping[str, object]:
    """Return the KL penalty in the loss, or null.

    NeMo-RL multiplies its estimate by pi / sg(pi), whose value is 1 and whose gradient adds the estimate times that of
    log pi. The gradient of k3 is then d times that of log pi, d = log pi - log pi_ref, which is that of k2 alone.
    """
    coefficient, kind = (
        s.number("loss_fn.reference_policy_kl_penalty") or 0.0,
        s.text("loss_fn.reference_policy_kl_type"),
    )
    if not coefficient or s.flag("loss_fn.use_kl_in_reward"):
        return {"algorithm.kl_loss": None}
    values = {"algorithm.kl_loss": {"kind": "k2", "coefficient": coefficient}}
    if s.flag("loss_fn.use_on_policy_kl_approximation"):
        raise NotConvertible(
            "megarl does not multiply the penalty by pi / pi_engine; where it is 1, the gradient is that of k2, which "
            "kl_loss.kind is",
            values,
        )
    if kind != "k3":
        raise NotConvertible(
            f"NeMo-RL's gradient of {kind} has terms that megarl's has not: (1 + d) for k1 and (d + d^2 / 2) for k2, "
            "d for k3, times that of log pi; kl_loss.kind is k2, whose gradient is d",
            values,
        )
    return values


def convert_kl_reward(s: Settings) -> Mapping[str, object]:
    """Return the KL penalty in the rewards, or null."""
    coefficient, kind = s.number("loss_fn.reference_policy_kl_penalty") or 0.0, algorithm_type(s)
    if not s.flag("loss_fn.use_kl_in_reward") or not coefficient:
        return {"algorithm.kl_reward": None}
    if kind not in ("ppo", "vapo", "reinforce_pp", "reinforce_pp_baseline"):
        raise NotConvertible(
            f"NeMo-RL has no penalty in rewards with {kind} either: none", {"algorithm.kl_reward": None}
        )
    section = {"kind": s.text("loss_fn.reference_policy_kl_type") or "k3", "coefficient": coefficient}
    values: dict[str, object] = {"algorithm.kl_reward": section}
    if kind in ("reinforce_pp", "reinforce_pp_baseline"):
        raise NotConvertible(
            "NeMo-RL subtracts the penalty of a token from its own advantage; megarl subtracts it from the reward, so "
            "that the advantages of earlier tokens have it, too",
            values,
        )
    return values


def convert_correction(s: Settings) -> Mapping[str, object]:
    """Return the weights for the difference between engine and trainer, or null."""
    if not s.flag("loss_fn.use_importance_sampling_correction"):
        return {"algorithm.rollout_is": None}
    kind, by_sequence = s.text(f"{TRUNCATED}_type"), s.flag("loss_fn.sequence_level_importance_ratios")
    high, low = s.number(f"{TRUNCATED}_ratio"), s.number(f"{TRUNCATED}_ratio_min")
    weights = "sequence_tis" if by_sequence else "token_tis"
    section: dict[str, object] = {"kind": weights, "high": high if kind and high else NO_BOUND}
    match kind:
        case "icepop" if not by_sequence:
            section = {"kind": "icepop", "low": low, "high": high}
        case "seq-mask-tis":
            raise NotConvertible(
                "megarl has the mask (geometric_mask) or the weights (token_tis), not both; it has the mask",
                {"algorithm.rollout_is": {"kind": "geometric_mask", "low": low, "high": high}},
            )
        case "icepop":
            raise NotConvertible("megarl masks tokens (icepop), not sequences", {"algorithm.rollout_is": section})
        case _ if low:
            raise NotConvertible(
                f"megarl's weights have no lower bound, which is {low:g} here", {"algorithm.rollout_is": section}
            )
    return {"algorithm.rollout_is": section}


def convert_ratio(s: Settings) -> Mapping[str, object]:
    """Return nothing where the ratio is 1 all the same."""
    forced, off = s.flag("loss_fn.force_on_policy_ratio"), s.flag("loss_fn.disable_ppo_ratio")
    if off or (forced and updates_per_step(s) > 1):
        name = "disable_ppo_ratio" if off else "force_on_policy_ratio"
        raise NotConvertible(
            f"{name}: megarl's loss has the ratio pi / pi_old, which is 1 in the first update of a step only"
        )
    return {}


def convert_returns(s: Settings) -> Mapping[str, object]:
    """Return gamma and lambda of GAE; with VAPO's lambda by length, `lam` is the critic's."""
    kind, lam = algorithm_type(s), s.number(estimator(s, "gae_lambda"))
    if kind not in ("ppo", "vapo"):
        return {}
    values: dict[str, object] = {"algorithm.gamma": s.number(estimator(s, "gae_gamma")), "algorithm.lam": lam}
    critic, policy = s.number(estimator(s, "gae_lambda_value")), s.number(estimator(s, "gae_lambda_policy"))
    if kind == "vapo":
        values["algorithm.lam"] = lam if critic is None else critic
        values["algorithm.length_alpha"] = s.number(estimator(s, "length_adaptive_alpha"))
        return values
    if critic is not None or policy is not None:
        raise NotConvertible("megarl's ppo has one lambda; vapo has one by length for the policy", values)
    return values


def convert_nll(s: Settings) -> Mapping[str, object]:
    """Return the weight of the likelihood of completions with a positive reward, which VAPO has."""
    weight = s.number("loss_fn.positive_example_nll_weight") or 0.0
    if algorithm_type(s) == "vapo":
        return {"algorithm.nll_coefficient": weight}
    if weight:
        raise NotConvertible("megarl adds the likelihood of completions with a positive reward in vapo only")
    return {}


def convert_overlong(s: Settings) -> Mapping[str, object]:
    """Return DAPO's penalty on long completions."""
    shaping = f"{head(s)}.reward_shaping"
    if not s.flag(f"{shaping}.enabled"):
        return {}
    if algorithm_type(s) != "dapo":
        raise NotConvertible("the penalty on long completions is part of megarl's dapo, which needs dynamic sampling")
    return {
        "algorithm.overlong.buffer": s.whole(f"{shaping}.overlong_buffer_length"),
        "algorithm.overlong.factor": s.number(f"{shaping}.overlong_buffer_penalty"),
        "algorithm.overlong.max_length": s.whole(f"{shaping}.max_response_length")
        or s.whole("policy.max_total_sequence_length"),
    }


def convert_critic(s: Settings) -> Mapping[str, object]:
    """Return the critic's settings."""
    if algorithm_type(s) not in ("ppo", "vapo"):
        return {}
    values: dict[str, object] = {"algorithm.critic.clip": s.number("value_loss_fn.cliprange")}
    for name in ("lr", "weight_decay"):
        key = f"value.megatron_cfg.optimizer.{name}" if uses_megatron(s) else f"value.optimizer.kwargs.{name}"
        if (number := s.number(key)) is not None:
            values[f"algorithm.critic.optimizer.{name}"] = number
    if steps := s.whole("ppo.policy_training_start_step"):
        values["algorithm.critic.warmup_steps"] = steps
    if s.is_given("value.model_name"):
        values["algorithm.critic.path"] = s.text("value.model_name")
    return values


def batch(s: Settings) -> tuple[int, int, int]:
    """Return (prompts, completions per prompt, mini-batches) of a step; train_global_batch_size counts completions."""
    prompts = s.whole(f"{head(s)}.num_prompts_per_step") or 1
    group, size = s.whole(f"{head(s)}.num_generations_per_prompt") or 1, s.whole("policy.train_global_batch_size") or 1
    return prompts, group, max(1, math.ceil(prompts * group / size))


def updates_per_step(s: Settings) -> int:
    """Return the optimizer steps of a training step."""
    return batch(s)[2] * (s.whole("ppo.ppo_epochs") or 1 if head(s) == "ppo" else 1)


def updates_of_schedule(s: Settings) -> int:
    """Return the optimizer steps in which NeMo-RL's learning-rate schedule advances once."""
    supervised = any(key.startswith(("sft.", "dpo.", "rm.")) for key in s.given)
    return 1 if supervised else updates_per_step(s)


def convert_batch(s: Settings) -> Mapping[str, object]:
    """Return the sizes of a step and of its mini-batches."""
    prompts, group, num = batch(s)
    values = {"algorithm.prompts_per_step": prompts, "algorithm.group_size": group}
    if prompts % num:
        even = next((n for n in range(num, prompts + 1) if prompts % n == 0), prompts)
        raise NotConvertible(
            f"completions of a prompt stay in one mini-batch: {prompts} prompts become {even} mini-batches, not {num}",
            {**values, "algorithm.num_mini_batches": even},
        )
    return {**values, "algorithm.num_mini_batches": num}


def convert_steps(s: Settings, section: str) -> Mapping[str, object]:
    """Return the number of steps, unless only epochs limit it."""
    steps = s.whole(f"{section}.max_num_steps")
    if steps is None or steps < 1 or steps >= 100_000:
        raise NotConvertible("megarl counts steps, not epochs: set trainer.steps to epochs * rows / rows of a step")
    return {"trainer.steps": steps}


def convert_micro_batch(s: Settings) -> Mapping[str, object]:
    """Return the tokens of a micro-batch."""
    samples, length = s.whole("policy.train_micro_batch_size") or 1, s.whole("policy.max_total_sequence_length") or 512
    for section in ("sequence_packing", "dynamic_batching"):
        if s.flag(f"policy.{section}.enabled") and (tokens := s.whole(f"policy.{section}.train_mb_tokens")):
            return {"trainer.max_tokens_per_micro_batch": tokens}
    return {"trainer.max_tokens_per_micro_batch": samples * length}


def optimizer_key(s: Settings, megatron: str, torch: str) -> str:
    """Return the key of the backend that trains."""
    return f"{MEGATRON}.optimizer.{megatron}" if uses_megatron(s) else f"policy.optimizer.kwargs.{torch}"


def convert_optimizer(s: Settings) -> Mapping[str, object]:
    """Return the numbers of Adam, of the backend that trains."""
    values: dict[str, object] = {}
    for name, torch in (("lr", "lr"), ("weight_decay", "weight_decay"), ("eps", "eps")):
        key = optimizer_key(s, "adam_eps" if name == "eps" else name, torch)
        if (number := s.number(key)) is not None:
            values[f"trainer.optimizer.{name}"] = number
    if uses_megatron(s):
        values["trainer.optimizer.beta1"] = s.number(f"{MEGATRON}.optimizer.adam_beta1")
        values["trainer.optimizer.beta2"] = s.number(f"{MEGATRON}.optimizer.adam_beta2")
    elif isinstance(betas := s.value("policy.optimizer.kwargs.betas"), list) and len(betas) == 2:
        values["trainer.optimizer.beta1"], values["trainer.optimizer.beta2"] = map(float, betas)
    return values


def convert_schedule_of_lr(s: Settings, updates: int) -> Mapping[str, object]:
    """Return warm-up and decay: NeMo-RL advances its schedule once per training step.

    Args:
        updates: optimizer steps of a training step.
    """
    if uses_megatron(s):
        shape = s.text(f"{MEGATRON}.scheduler.lr_decay_style") or "constant"
        steps = s.whole(f"{MEGATRON}.scheduler.lr_warmup_iters") or 0
        values: dict[str, object] = {"trainer.optimizer.warmup_steps": steps * updates}
        if shape not in ("constant", "linear", "cosine"):
            raise NotConvertible(f"megarl has constant, linear and cosine, or a function of yours, not {shape}", values)
        values["trainer.optimizer.decay"] = shape
        if shape != "constant":
            values["trainer.optimizer.min_lr"] = s.number(f"{MEGATRON}.optimizer.min_lr") or 0.0
        return values
    schedules = s.value("policy.scheduler")
    parts = schedules if isinstance(schedules, list) else [{"name": None, **_section(s, "policy.scheduler")}]
    values, unknown = {}, []
    for part in parts:
        name = str(part.get("name") if isinstance(part, dict) else None).rpartition(".")[2]
        kwargs = part.get("kwargs") if isinstance(part, dict) else None
        if name == "LinearLR" and isinstance(kwargs, dict) and kwargs.get("end_factor", 1.0) == 1.0:
            values["trainer.optimizer.warmup_steps"] = int(kwargs.get("total_iters", 5)) * updates
        elif name == "CosineAnnealingLR" and isinstance(kwargs, dict):
            values["trainer.optimizer.decay"] = "cosine"
            values["trainer.optimizer.min_lr"] = float(kwargs.get("eta_min", 0.0))
        elif name not in ("ConstantLR", "None", "") and isinstance(part, dict):
            unknown.append(name)
    if unknown:
        raise NotConvertible(f"megarl has constant, linear and cosine, or a function of yours: {unknown}", values)
    return values


def _section(s: Settings, name: str) -> dict[str, object]:
    return {setting.key.removeprefix(f"{name}."): setting.value for setting in s.matching(f"{name}.*")}


def convert_parallel(s: Settings) -> Mapping[str, object]:
    """Return the parallel sizes of the trainer."""
    if not uses_megatron(s):
        sizes = {"tp": s.whole(f"{DTENSOR}.tensor_parallel_size"), "cp": s.whole(f"{DTENSOR}.context_parallel_size")}
        return {f"trainer.parallel.{name}": size for name, size in sizes.items() if size and size > 1}
    names = {
        "tensor_model": "tp",
        "pipeline_model": "pp",
        "context": "cp",
        "expert_model": "ep",
        "expert_tensor": "etp",
    }
    found = {name: s.whole(f"{MEGATRON}.{key}_parallel_size") or 1 for key, name in names.items()}
    values: dict[str, object] = {
        f"trainer.parallel.{name}": size
        for name, size in found.items()
        if size != (found["tp"] if name == "etp" else 1)
    }
    if found["tp"] > 1 and not s.flag(f"{MEGATRON}.sequence_parallel"):
        values["trainer.parallel.sequence_parallel"] = False
    for side in ("first", "last"):
        if (layers := s.whole(f"{MEGATRON}.num_layers_in_{side}_pipeline_stage")) is not None:
            values[f"trainer.parallel.{side}_stage_layers"] = layers
    return values


def convert_recompute(s: Settings) -> Mapping[str, object]:
    """Return activation recomputation, which activation_checkpointing turns on."""
    if not s.flag(f"{MEGATRON if uses_megatron(s) else DTENSOR}.activation_checkpointing"):
        return {}
    granularity = (s.text(f"{MEGATRON}.recompute_granularity") or "full") if uses_megatron(s) else "full"
    values: dict[str, object] = {"trainer.recompute.granularity": granularity}
    if granularity == "selective" and (modules := s.texts(f"{MEGATRON}.recompute_modules")):
        values["trainer.recompute.modules"] = modules
    return values


def convert_fp8(s: Settings) -> Mapping[str, object]:
    """Return training in FP8."""
    section = f"{MEGATRON}.fp8_cfg"
    if not (uses_megatron(s) and s.flag(f"{section}.enabled")):
        return {}
    values: dict[str, object] = {
        "trainer.megatron.model.fp8": s.text(f"{section}.fp8") or "e4m3",
        "trainer.megatron.model.fp8_recipe": s.text(f"{section}.fp8_recipe") or "blockwise",
    }
    if s.flag(f"{section}.fp8_param"):
        raise NotConvertible("parameters stay in bfloat16", values)
    return values


def convert_fields(s: Settings, pattern: str, part: Part) -> Mapping[str, object]:
    """Return fields of megatron-core's configurations, for which megarl has the same names."""
    values: dict[str, object] = {}
    problems = []
    for setting in s.matching(pattern):
        name = setting.key.removeprefix(pattern.removesuffix("*"))
        if setting.unknown or setting.value is None or not uses_megatron(s):
            continue
        if problem := next(find_field_problems(part, {name: setting.value}), None):
            problems.append(problem)
        else:
            values[f"trainer.megatron.{part}.{name}"] = setting.value
    if problems:
        raise NotConvertible("; ".join(problems), values)
    return values


def convert_slots(s: Settings) -> Mapping[str, object]:
    """Return the slots of trainer and engines, and the engines that fill theirs."""
    nodes, per_node = s.whole("cluster.num_nodes") or 1, s.whole("cluster.gpus_per_node") or 1
    backend = s.text(f"{GENERATION}.backend") or "vllm"
    key = f"{GENERATION}.sglang_cfg.tp_size" if backend == "sglang" else f"{GENERATION}.vllm_cfg.tensor_parallel_size"
    wanted = s.whole(key) or s.whole(f"{GENERATION}.sglang_cfg.sglang_server_config.num_gpus_per_engine") or 1
    values: dict[str, object] = {}
    total, tp = nodes * per_node, wanted
    if s.flag(f"{GENERATION}.colocated.enabled"):
        tp = min(wanted, per_node)
    else:
        resources = f"{GENERATION}.colocated.resources"
        own_nodes = s.whole(f"{resources}.num_nodes") or 1
        own = s.whole(f"{resources}.gpus_per_node") or per_node
        if nodes == 1:
            per_node -= own
        else:
            nodes -= own_nodes
        values["placement.pools.engines"] = {"nodes": own_nodes, "slots_per_node": own}
        values["placement.rollout.pool"] = "engines"
        total = own_nodes * own
    if nodes < 1 or per_node < 1:
        raise Refused(
            f"{GENERATION}.colocated.enabled", "the engines have all GPUs of the cluster, the trainer has none"
        )
    values |= {"placement.nodes": nodes, "placement.slots_per_node": per_node}
    values |= {"rollout.tp": tp, "rollout.replicas": max(1, total // tp)}
    if tp != wanted:
        raise NotConvertible(f"engines that share the trainer's GPUs fit on one node: tp {wanted} becomes {tp}", values)
    return values


def convert_engine_options(s: Settings) -> Mapping[str, object]:
    """Return arguments of SGLang."""
    prefix = f"{GENERATION}.sglang_cfg."
    handled = ("tp_size", "mem_fraction_static", "max_running_requests", "model_path", "gpus_per_server", "dtype")
    values: dict[str, object] = {}
    problems = []
    for setting in s.matching(f"{prefix}*"):
        name = setting.key.removeprefix(prefix)
        if setting.unknown or setting.value is None or name in handled or "." in name:
            continue
        if problem := next(find_option_problems({name: setting.value}), None):
            problems.append(problem)
        else:
            values[f"rollout.engine.extra_args.{name}"] = setting.value
    if problems:
        raise NotConvertible("; ".join(problems), values)
    return values


def convert_mem_fraction(s: Settings) -> Mapping[str, object]:
    """Return the engines' share of a GPU's memory."""
    backend = s.text(f"{GENERATION}.backend") or "vllm"
    key = "sglang_cfg.mem_fraction_static" if backend == "sglang" else "vllm_cfg.gpu_memory_utilization"
    fraction = s.number(f"{GENERATION}.{key}")
    return {} if fraction is None else {"rollout.engine.mem_fraction": fraction}


def convert_async(s: Settings) -> Mapping[str, object]:
    """Return how far generation runs ahead of training."""
    section = f"{head(s)}.async_{head(s)}"
    if not s.flag(f"{section}.enabled"):
        return {}
    age = max(1, s.whole(f"{section}.max_trajectory_age_steps") or 1)
    update = "drain"
    if s.flag(f"{section}.in_flight_weight_updates"):
        update = "retract" if s.flag(f"{section}.recompute_kv_cache_after_weight_updates") else "in_place"
    return {
        "schedule.type": "async",
        "schedule.max_staleness": age,
        "schedule.lookahead": age,
        "schedule.update": update,
    }


def convert_rewards(s: Settings) -> Mapping[str, object]:
    """Return the reward terms of the environment that the data names."""
    name = s.text("data.train.env_name") or s.text("data.default.env_name") or "math"
    values: dict[str, object] = {"reward.terms.accuracy": {"type": "math"}}
    if any(s.matching("env.reward_model.*")) or name == "reward_model":
        path = s.text("env.reward_model.model_name") or "REWARD_MODEL"
        return {
            "reward.terms.reward_model": {"type": "model", "path": path},
            "reward.terms.accuracy": {"type": "math", "weight": 0},
        }
    if name == "math":
        return values
    raise NotConvertible(
        f"write the environment {name} as a reward of type: python, or as rollout.env; it is math here", values
    )


def convert_turns(s: Settings) -> Mapping[str, object]:
    """Return an environment of the user's for rollouts with several turns."""
    turns = s.whole(f"{head(s)}.max_rollout_turns") or 1
    if turns <= 1:
        return {}
    raise NotConvertible(
        "write the environment as a class with reset(task), step(reply) and close(), and check rollout.env.path",
        {"rollout.env.path": "your_package.env:Env", "rollout.env.max_turns": turns},
    )


def convert_wandb(s: Settings) -> Mapping[str, object]:
    """Return the project and name in Weights & Biases."""
    if not s.flag("logger.wandb_enabled"):
        return {}
    section = {"project": s.text("logger.wandb.project") or "nemo-rl", "name": s.text("logger.wandb.name")}
    return {"tracking.wandb": {key: value for key, value in section.items() if value is not None}}


def convert_checkpoints(s: Settings) -> Mapping[str, object]:
    """Return the steps between checkpoints; 0 without any."""
    return {"checkpoint.every": (s.whole("checkpointing.save_period") or 0) if s.flag("checkpointing.enabled") else 0}


def convert_dpo_loss(s: Settings) -> Mapping[str, object]:
    """Return the coefficients of the loss on pairs."""
    weight, nll = s.number("dpo.preference_loss_weight"), s.number("dpo.sft_loss_weight") or 0.0
    values: dict[str, object] = {"dpo.beta": s.number("dpo.reference_policy_kl_penalty")}
    if nll:
        values["dpo.nll"] = nll
    problems = []
    if s.flag("dpo.preference_average_log_probs"):
        problems.append("megarl sums log-probabilities over the answer, and does not average them")
    if nll and not s.flag("dpo.sft_average_log_probs"):
        problems.append("megarl's likelihood of the chosen answer is a mean over its tokens, not a sum")
    if weight not in (None, 1.0):
        problems.append(f"megarl's preference loss has the weight 1, not {weight:g}")
    if problems:
        raise NotConvertible("; ".join(problems), values)
    return values
