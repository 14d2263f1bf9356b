"""Conversion of verl's keys of batches, optimizer, parallel sizes, engines, schedule and slots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

from megarl.config.engine_options import find_option_problems
from megarl.config.megatron import Part, find_field_problems
from megarl.importing.tables import NotConvertible, Settings
from megarl.importing.verl.loss_settings import ACTOR, algorithm_type

ENTRY_KEY = "entry point"
"""Key under which the settings have the module that a script starts: it chooses the schedule."""

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
MEGATRON = f"{ACTOR}.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"
SP_KEYS = (f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")

SIZES: Mapping[str, str] = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
"""Key of a section `megatron` -> key of `parallel`."""


def uses_megatron(s: Settings) -> bool:
    """Whether Megatron trains, and not FSDP."""
    engines = {s.text(key) for key in (f"{ACTOR}.strategy", "model_engine") if s.is_given(key)}
    return "megatron" in engines or (not engines and any(fnmatchcase(k, f"{MEGATRON}.*") for k in s.given))


def schedule_type(s: Settings) -> str:
    """Return `schedule.type` of the module that the script starts, or of the mode of the present trainer."""
    entry = s.text(ENTRY_KEY) or ""
    if "one_step_off" in entry:
        return "one_step_off"
    if "fully_async" in entry or any(s.matching("async_training.*")):
        return "async"
    mode = s.text("trainer.v1.trainer_mode") or "sync"
    return "sync" if mode == "sync" or not s.flag("trainer.use_v1") else "async"


def is_fully_async(s: Settings) -> bool:
    """Whether the trainer is the one of the keys `async_training`."""
    return "fully_async" in (s.text(ENTRY_KEY) or "") or any(s.matching("async_training.*"))


def batch(s: Settings) -> tuple[int, int]:
    """Return the prompts of a step and its number of mini-batches; in verl both sizes count prompts."""
    mini = s.whole(f"{ACTOR}.ppo_mini_batch_size") or 1
    if is_fully_async(s):
        batches = (s.whole("async_training.require_batches") or 1) * (
            s.whole("async_training.trigger_parameter_sync_step") or 1
        )
        return mini * batches, batches
    prompts = s.whole("data.train_batch_size") or 1
    if mini >= prompts:
        return prompts, 1
    return prompts, math.ceil(prompts / mini)


def convert_batch(s: Settings) -> Mapping[str, object]:
    """Return the sizes of a step and of its mini-batches."""
    prompts, num = batch(s)
    values = {"algorithm.prompts_per_step": prompts, "algorithm.num_mini_batches": num}
    mini = prompts if is_fully_async(s) else min(prompts, s.whole(f"{ACTOR}.ppo_mini_batch_size") or 1)
    if prompts % num or (not is_fully_async(s) and prompts % mini):
        even = next(n for n in range(num, prompts + 1) if prompts % n == 0)
        raise NotConvertible(
            f"megarl needs mini-batches of equal size: {prompts} prompts become {even} mini-batches",
            {**values, "algorithm.num_mini_batches": even},
        )
    return values


def updates_per_step(s: Settings) -> int:
    """Return the optimizer steps of a training step."""
    return batch(s)[1] * (s.whole(f"{ACTOR}.ppo_epochs") or 1)


def convert_steps(s: Settings) -> Mapping[str, object]:
    """Return the number of steps."""
    steps = s.whole("trainer.total_training_steps")
    if steps is None and s.is_given("rollout.total_rollout_steps"):
        steps = max(1, (s.whole("rollout.total_rollout_steps") or 1) // batch(s)[0])
    if steps is None:
        raise NotConvertible(
            "megarl counts steps, not epochs: set trainer.steps to epochs * rows / prompts_per_step; without it a run "
            "has 100 steps"
        )
    return {"trainer.steps": steps}


def convert_warmup(s: Settings) -> Mapping[str, object]:
    """Return the warm-up in optimizer steps: verl advances its schedule once per training step."""
    return _warmup(s, f"{ACTOR}.optim", "trainer.optimizer.warmup_steps")


def convert_critic_warmup(s: Settings) -> Mapping[str, object]:
    """Return the warm-up of the critic in optimizer steps."""
    return _warmup(s, "critic.optim", "algorithm.critic.optimizer.warmup_steps") if has_critic(s) else {}


def _warmup(s: Settings, optim: str, to: str) -> Mapping[str, object]:
    steps, ratio = s.whole(f"{optim}.lr_warmup_steps"), s.number(f"{optim}.lr_warmup_steps_ratio") or 0.0
    if steps is None or steps < 0:
        total = s.whole("trainer.total_training_steps")
        if ratio and total is None:
            raise NotConvertible(
                f"the warm-up is a share of the training, whose length is not known: set {to} to {ratio:g} * "
                f"trainer.steps * {updates_per_step(s)}"
            )
        steps = int(ratio * (total or 0))
    return {to: steps * updates_per_step(s)} if steps else {}


def convert_decay(s: Settings) -> Mapping[str, object]:
    """Return the shape of the decay: `lr_decay_style` of Megatron, `lr_scheduler_type` of FSDP."""
    keys = ("lr_decay_style", "lr_scheduler_type", "warmup_style")
    given = [s.text(f"{ACTOR}.optim.{key}") for key in keys if s.is_given(f"{ACTOR}.optim.{key}")]
    shape = next((shape for shape in given if shape), "constant")
    if shape not in ("constant", "linear", "cosine"):
        raise NotConvertible(
            f"megarl has constant, linear and cosine, or a function of yours, not {shape}: trainer.optimizer.decay is "
            "constant"
        )
    return {"trainer.optimizer.decay": shape}


def convert_min_lr(s: Settings) -> Mapping[str, object]:
    """Return the learning rate at the end of the decay: `min_lr`, or `min_lr_ratio` of FSDP times the peak."""
    lr, ratio = s.number(f"{ACTOR}.optim.lr") or 0.0, s.number(f"{ACTOR}.optim.min_lr_ratio")
    min_lr = s.number(f"{ACTOR}.optim.min_lr") or (ratio or 0.0) * lr
    return {"trainer.optimizer.min_lr": min_lr} if min_lr else {}


def convert_betas(s: Settings, optim: str, to: str) -> Mapping[str, object]:
    """Return the decay rates of Adam's moments."""
    betas = s.value(f"{optim}.betas")
    if not isinstance(betas, list) or len(betas) != 2:
        raise NotConvertible(f"betas needs a list of two numbers, got {betas!r}")
    return {f"{to}.beta1": float(str(betas[0])), f"{to}.beta2": float(str(betas[1]))}


def convert_clip_grad(s: Settings) -> Mapping[str, object]:
    """Return the largest norm of gradients; `actor.grad_clip` is FSDP's older name."""
    old = f"{ACTOR}.grad_clip"
    return {"trainer.optimizer.clip_grad": s.number(old if s.is_given(old) else f"{ACTOR}.optim.clip_grad")}


def convert_parallel(s: Settings) -> Mapping[str, object]:
    """Return the parallel sizes of the trainer; those of FSDP are context-parallel only."""
    if uses_megatron(s):
        return _sizes(s, MEGATRON, "trainer.parallel")
    cp = max((s.whole(key) or 1 for key in SP_KEYS if s.is_given(key)), default=1)
    return {"trainer.parallel.cp": cp} if cp > 1 else {}


def context_parallel(s: Settings) -> int:
    """Return the number of ranks that split a sequence."""
    value = convert_parallel(s).get("trainer.parallel.cp", 1)
    assert isinstance(value, int)
    return value


def _sizes(s: Settings, section: str, to: str) -> dict[str, object]:
    sizes = {name: s.whole(f"{section}.{key}") for key, name in SIZES.items()}
    values: dict[str, object] = {
        f"{to}.{name}": size for name, size in sizes.items() if size is not None and (size != 1 or name == "etp")
    }
    if sizes["etp"] is not None and sizes["etp"] == (sizes["tp"] or 1):
        del values[f"{to}.etp"]  # the default
    if (sizes["tp"] or 1) > 1 and not s.flag(f"{section}.sequence_parallel"):
        values[f"{to}.sequence_parallel"] = False
    for side in ("first", "last"):
        layers = s.whole(f"{section}.override_transformer_config.num_layers_in_{side}_pipeline_stage")
        if layers is not None:
            values[f"{to}.{side}_stage_layers"] = layers
    return values


def uses_reference(s: Settings) -> bool:
    """Whether a KL penalty needs the reference model."""
    in_loss = s.flag(f"{ACTOR}.use_kl_loss") and bool(s.number(f"{ACTOR}.kl_loss_coef"))
    in_reward = s.flag("algorithm.use_kl_in_reward") and bool(s.number("algorithm.kl_ctrl.kl_coef"))
    return in_loss or in_reward


def convert_reference_parallel(s: Settings) -> Mapping[str, object]:
    """Return the parallel sizes of the reference model, if they differ from the policy's."""
    if not uses_reference(s) or not uses_megatron(s):
        return {}
    own = {name: s.whole(f"{REF}.megatron.{key}") for key, name in SIZES.items()}
    policy = {name: s.whole(f"{MEGATRON}.{key}") for key, name in SIZES.items()}
    merged = {name: policy[name] if size is None else size for name, size in own.items()}
    if merged == policy:
        return {}
    return {"algorithm.reference.parallel": {name: size for name, size in merged.items() if size is not None}}


def convert_critic_parallel(s: Settings) -> Mapping[str, object]:
    """Return the parallel sizes of the critic, if they differ from the policy's."""
    if not has_critic(s) or not uses_megatron(s):
        return {}
    own, policy = (_sizes(s, section, "") for section in ("critic.megatron", MEGATRON))
    return {} if own == policy else {"algorithm.critic.parallel": {key[1:]: size for key, size in own.items()}}


def has_critic(s: Settings) -> bool:
    """Whether the algorithm trains a critic."""
    return algorithm_type(s) in ("ppo", "pf_ppo")


def convert_recompute(s: Settings) -> Mapping[str, object]:
    """Return activation recomputation: of Megatron's keys, or complete layers as FSDP's gradient checkpointing does."""
    if not uses_megatron(s):
        full = s.flag(f"{MODEL}.enable_gradient_checkpointing")
        return {"trainer.recompute.granularity": "full"} if full else {}
    granularity = s.text(f"{TRANSFORMER}.recompute_granularity")
    if granularity is None:
        return {}
    values: dict[str, object] = {"trainer.recompute.granularity": granularity}
    if granularity == "selective" and s.is_given(f"{TRANSFORMER}.recompute_modules"):
        values["trainer.recompute.modules"] = s.texts(f"{TRANSFORMER}.recompute_modules")
    if granularity == "full":
        values["trainer.recompute.method"] = s.text(f"{TRANSFORMER}.recompute_method") or "uniform"
        values["trainer.recompute.layers"] = s.whole(f"{TRANSFORMER}.recompute_num_layers") or 1
    return values


def convert_fields(s: Settings, pattern: str, part: Part, handled: tuple[str, ...] = ()) -> Mapping[str, object]:
    """Return fields of megatron-core's configurations, for which megarl has the same names.

    Raises:
        NotConvertible: megarl sets some of them itself, or refuses them; it has the reason of each.
    """
    values: dict[str, object] = {}
    problems: dict[str, str] = {}
    for setting in s.matching(pattern):
        name = setting.key.removeprefix(pattern.removesuffix("*"))
        if setting.unknown or name in handled:
            continue
        if setting.value is None:
            continue
        if problem := next(find_field_problems(part, {name: setting.value}), None):
            problems[setting.key] = problem.partition(": ")[2]
        else:
            values[f"trainer.megatron.{part}.{name}"] = setting.value
    if problems:
        raise NotConvertible("refused fields", values, by_key=problems)
    return values


def convert_aux_loss(s: Settings) -> Mapping[str, object]:
    """Return the load-balancing loss of the routers."""
    coefficient = s.number(f"{TRANSFORMER}.moe_aux_loss_coeff") or 0.0
    scopes = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence", "global_aux_loss": "global_batch"}
    kind = s.text(f"{TRANSFORMER}.moe_router_load_balancing_type") or "aux_loss"
    if not coefficient or kind == "none":
        return {}
    if kind not in scopes:
        raise NotConvertible(f"megarl has {', '.join(scopes)}, not {kind}")
    return {"trainer.moe.aux_loss_coeff": coefficient, "trainer.moe.aux_loss_scope": scopes[kind]}


def convert_router_replay(s: Settings) -> Mapping[str, object]:
    """Return where experts come from when a step passes over a token again."""
    modes = [s.text(f"{ACTOR}.router_replay.mode"), s.text(f"{MEGATRON}.router_replay.mode")]
    mode = next((mode for mode in modes if mode not in (None, "disabled")), None)
    if mode is None and s.flag(f"{ROLLOUT}.enable_rollout_routing_replay"):
        mode = "R3"
    if mode is None:
        return {}
    if mode not in ("R2", "R3"):
        raise NotConvertible(f"megarl replays routes as R2 or R3, not from files: {mode}")
    return {"trainer.moe.router_replay": mode}


def convert_micro_batch(s: Settings) -> Mapping[str, object]:
    """Return the tokens of a micro-batch, over all context-parallel ranks."""
    to = "trainer.max_tokens_per_micro_batch"
    if s.flag(f"{ACTOR}.use_dynamic_bsz"):
        return {to: (s.whole(f"{ACTOR}.ppo_max_token_len_per_gpu") or 16384) * context_parallel(s)}
    samples = s.whole(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if samples is None:
        raise NotConvertible("the micro-batch is not given per GPU: trainer.max_tokens_per_micro_batch is the default")
    length = (s.whole("data.max_prompt_length") or 512) + (s.whole("data.max_response_length") or 512)
    return {to: samples * length}


def rollout_slots(s: Settings) -> tuple[int, int] | None:
    """Return (nodes, GPUs per node) of engines with GPUs of their own, or None if they share the trainer's."""
    for head in ("rollout", ROLLOUT):
        nodes = s.whole(f"{head}.nnodes")
        if schedule_type(s) != "sync" and nodes:
            return nodes, s.whole(f"{head}.n_gpus_per_node") or s.whole("trainer.n_gpus_per_node") or 8
    return None


def convert_slots(s: Settings) -> Mapping[str, object]:
    """Return the slots of trainer and engines, and the engines that fill theirs."""
    nodes, per_node = s.whole("trainer.nnodes") or 1, s.whole("trainer.n_gpus_per_node") or 8
    values: dict[str, object] = {"placement.nodes": nodes, "placement.slots_per_node": per_node}
    own = rollout_slots(s)
    if own:
        nodes, per_node = own
        values["placement.pools.engines"] = {"nodes": nodes, "slots_per_node": per_node}
        values["placement.rollout.pool"] = "engines"
    wanted = s.whole(f"{ROLLOUT}.tensor_model_parallel_size") or 1
    tp = wanted if own else min(wanted, per_node)
    if s.whole(f"{ROLLOUT}.expert_parallel_size") == tp * (s.whole(f"{ROLLOUT}.data_parallel_size") or 1):
        values["rollout.engine.extra_args.ep_size"] = tp
    if values.get("rollout.engine.extra_args.ep_size") == 1:
        del values["rollout.engine.extra_args.ep_size"]
    values |= {"rollout.tp": tp, "rollout.replicas": max(1, nodes * per_node // tp)}
    if tp != wanted:
        raise NotConvertible(f"engines that share the trainer's GPUs fit on one node: tp {wanted} becomes {tp}", values)
    return values


def convert_engine_options(s: Settings) -> Mapping[str, object]:
    """Return arguments of SGLang.

    Raises:
        NotConvertible: megarl sets some of them itself, or refuses them; it has the reason of each.
    """
    prefix = f"{ROLLOUT}.engine_kwargs.sglang."
    values: dict[str, object] = {}
    problems: dict[str, str] = {}
    for setting in s.matching(f"{prefix}*"):
        name = setting.key.removeprefix(prefix)
        if setting.unknown or setting.value is None:
            continue
        if problem := next(find_option_problems({name: setting.value}), None):
            problems[setting.key] = problem.partition(": ")[2]
        else:
            values[f"rollout.engine.extra_args.{name}"] = setting.value
    if problems:
        raise NotConvertible("refused options", values, by_key=problems)
    return values


def convert_schedule(s: Settings) -> Mapping[str, object]:
    """Return how far generation runs ahead of training."""
    kind = schedule_type(s)
    if kind == "sync":
        return {}
    values: dict[str, object] = {"schedule.type": kind}
    if kind == "one_step_off" and rollout_slots(s) is None:
        raise NotConvertible(
            "engines that share the trainer's GPUs release their memory during training, so that the next batch "
            "cannot be sampled then: schedule.type is async with lookahead 1",
            {"schedule.type": "async", "schedule.lookahead": 1, "schedule.max_staleness": 1},
        )
    if is_fully_async(s):
        threshold = s.number("async_training.staleness_threshold") or 0.0
        values["schedule.max_staleness"] = max(1, math.ceil(threshold))
        values["schedule.lookahead"] = 1
        values["schedule.update"] = "abort" if s.flag("async_training.partial_rollout") else "drain"
    elif kind == "async":
        values["schedule.max_staleness"] = s.whole("trainer.v1.sampler.max_off_policy_threshold")
        values["schedule.late"] = s.text("trainer.v1.sampler.max_off_policy_strategy")
        values["schedule.update"] = "abort"
    return values
