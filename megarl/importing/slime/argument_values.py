"""slime's arguments: read from a launch script, and converted where they are not copied as they are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from megarl.config.engine_options import find_option_problems
from megarl.config.megatron import Part, find_field_problems
from megarl.errors import ConfigError
from megarl.importing.shell_script import Word, find_launch_command
from megarl.importing.tables import NotConvertible, Refused, Setting, Settings
from megarl.importing.verl.hydra_values import parse_value

ENTRY_KEY = "entry point"
"""Key under which the settings have the script that is started: train.py or train_async.py."""


ENTRY = re.compile(r"(^|/)train(_async)?\.py$")
ARRAY = re.compile(r"\$\{?\w+(\[[@*]\])?\}?")
NEGATED = {"--no-offload-train": "--offload-train", "--no-offload-rollout": "--offload-rollout"}
"""Arguments that turn another one off."""


def read_run(text: str, path: Path, variables: Mapping[str, str]) -> tuple[dict[str, Setting], list[str]]:
    """Return the settings by argument, such as `--lr`, and notes on the reading.

    Raises:
        ConfigError: no command starts slime, or the file is not a script.
        DataError: the script is malformed.
    """
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(f"{path}: slime is configured by arguments: give the script that starts train.py")
    command = find_launch_command(text, path, lambda word: bool(ENTRY.search(word)), variables=variables)
    notes = list(command.notes)
    given = read_arguments(command.arguments, notes)
    entry = command.words[command.entry]
    given[ENTRY_KEY] = Setting(key=ENTRY_KEY, value=entry.text, origin=entry.where)
    return given, notes


def read_arguments(words: Sequence[Word], notes: list[str]) -> dict[str, Setting]:
    """Return the settings of `--name`, `--name value ...` and `--name=value`; the last of equal names wins."""
    given: dict[str, Setting] = {}
    name, values, origin = "", list[Word](), ""

    def finish() -> None:
        if name:
            given.pop(name, None)
            given[name] = _setting(name, values, origin)

    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            finish()
            name, equals, value = word.text.partition("=")
            values = [replace(word, text=value)] if equals else []
            origin = word.where
        elif word.unknown and (not name or ARRAY.fullmatch(word.text)) and "@" in word.text + "".join(word.unknown):
            notes.append(
                f"{word.where}: the arguments {word.text} come from a file that was not found, and were not read"
            )
        elif name:
            values.append(word)
        elif word.text.strip():
            notes.append(f"{word.where}: {word.text!r} is no argument --name, and was not read")
    finish()
    return given


def _setting(name: str, values: Sequence[Word], origin: str) -> Setting:
    unknown = tuple(u for value in values for u in value.unknown)
    if name in NEGATED:
        return Setting(key=NEGATED[name], value=False, origin=origin)
    if not values:
        return Setting(key=name, value=True, origin=origin)
    if unknown:
        return Setting(key=name, value=" ".join(value.text for value in values), origin=origin, unknown=unknown)
    parsed = [_parsed(value.text) for value in values]
    return Setting(key=name, value=parsed if len(parsed) > 1 else parsed[0], origin=origin)


def _parsed(text: str) -> object:
    try:
        return parse_value(text)
    except ValueError:
        return text


ESTIMATOR = "--advantage-estimator"
ESTIMATORS: Mapping[str, str] = {
    "grpo": "grpo",
    "gspo": "gspo",
    "cispo": "cispo",
    "ppo": "ppo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
"""slime's advantage estimator -> megarl's algorithm."""

GROUPED = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
"""Algorithms whose advantages slime makes of rewards alone: the penalty of --kl-coef has no effect on them."""

SIZES: Mapping[str, str] = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
}
STAGES: Mapping[str, str] = {
    "--decoder-first-pipeline-num-layers": "first_stage_layers",
    "--decoder-last-pipeline-num-layers": "last_stage_layers",
}
KL_KINDS: Mapping[str, str] = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
MATH_REWARDS = ("math", "dapo", "deepscaler")
OPTIMIZER = ("lr", "weight_decay", "beta1", "beta2", "clip_grad")

SFT_FUNCTION = "slime.rollout.sft_rollout.generate_rollout"
SAMPLING_FUNCTIONS = ("slime.rollout.sglang_rollout.", "slime.rollout.sleep_rollout.", "fully_async_rollout.")
"""Beginnings, or the last parts, of slime's rollout functions that sample completions of the policy."""

SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<end>-?\d*)\]")
SLICES = "`@[A:B]` at its end is left out: megarl trains on whole files"


def algorithm_type(s: Settings) -> str:
    """Return `algorithm.type`.

    Raises:
        Refused: megarl has no such estimator.
    """
    estimator = s.text(ESTIMATOR) or "grpo"
    if estimator not in ESTIMATORS:
        raise Refused(ESTIMATOR, f"megarl has no estimator {estimator}; it has {', '.join(ESTIMATORS)}")
    kind, by_std = ESTIMATORS[estimator], not s.flag("--disable-grpo-std-normalization")
    is_raw = s.flag("--disable-rewards-normalization")
    if is_raw and kind not in ("ppo", "reinforce_pp"):
        raise Refused(
            "--disable-rewards-normalization",
            f"megarl has no {estimator} on rewards without the baseline of their group; use reinforce_plus_plus",
        )
    if not by_std and kind in ("gspo", "cispo"):
        raise Refused("--disable-grpo-std-normalization", f"megarl divides advantages of {kind} by the group's std")
    if kind == "grpo" and not by_std:
        return "dr_grpo"
    return "dapo" if kind == "grpo" and filters_groups(s) else kind


def filters_groups(s: Settings) -> bool:
    """Whether groups without differences in their rewards are replaced."""
    return "check_reward_nonzero_std" in (s.text("--dynamic-sampling-filter-path") or "")


def convert_type(s: Settings) -> Mapping[str, object]:
    """Return the algorithm, with what slime does with its advantages."""
    kind = algorithm_type(s)
    values: dict[str, object] = {"algorithm.type": kind}
    whitens = s.flag("--normalize-advantages")
    if kind == "dapo":
        values["algorithm.overlong"] = None
    if kind == "ppo":
        values["algorithm.whiten"] = whitens
    if kind in ("ppo", "reinforce_pp", "reinforce_pp_baseline"):
        values["algorithm.whiten_unbiased"] = True
    if kind in GROUPED and whitens:
        raise NotConvertible("megarl does not whiten the advantages of a group again over the batch", values)
    return values


def convert_filter(s: Settings) -> Mapping[str, object]:
    """Return dynamic sampling: DAPO's, or by pass rate with another algorithm."""
    if s.text("--dynamic-sampling-filter-path") is None:
        return {}
    if not filters_groups(s):
        raise NotConvertible("write the filter as a range of pass rates, data.difficulty, or as an algorithm")
    kind = algorithm_type(s)
    if kind == "dapo":
        return {}
    if kind not in GROUPED:
        raise NotConvertible(f"megarl replaces groups without a signal for algorithms with a group, not for {kind}")
    return {"data.difficulty.min_pass_rate": 1e-6, "data.difficulty.max_pass_rate": 1 - 1e-6}


def convert_clip(s: Settings) -> Mapping[str, object]:
    """Return the bounds of the ratio; --eps-clip is both where --eps-clip-high is not given."""
    low = s.number("--eps-clip")
    high = s.number("--eps-clip-high")
    high = low if high is None else high
    if algorithm_type(s) == "cispo":
        values = {"algorithm.clip_ratio_high": high}
        if (low or 0) < 1:
            raise NotConvertible(f"megarl's cispo has no lower bound, which is {1 - (low or 0):g} here", values)
        return values
    return {"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": high}


def convert_dual_clip(s: Settings) -> Mapping[str, object]:
    """Return the bound of losses of negative advantages."""
    bound, kind = s.number("--eps-clip-c"), algorithm_type(s)
    if bound is None or kind == "cispo":
        return {}
    if kind == "gspo":
        raise NotConvertible("megarl's gspo has no dual clip")
    return {"algorithm.dual_clip": bound}


def convert_kl_loss(s: Settings) -> Mapping[str, object]:
    """Return the KL penalty in the loss, or null."""
    coefficient, kind = s.number("--kl-loss-coef") or 0.0, s.text("--kl-loss-type") or "k1"
    if not s.flag("--use-kl-loss") or not coefficient:
        return {"algorithm.kl_loss": None}
    if kind not in KL_KINDS:
        raise NotConvertible(f"megarl has k2 and k3 in the loss, not {kind}", {"algorithm.kl_loss": None})
    if s.flag("--use-unbiased-kl"):
        raise NotConvertible(
            "megarl does not multiply the penalty by the ratio pi / pi_old. Where the ratio is 1, its gradient is that "
            "of k2, which kl_loss.kind is",
            {"algorithm.kl_loss": {"kind": "k2", "coefficient": coefficient}},
        )
    if kind == "k1":
        raise NotConvertible(
            "megarl has k2 and k3 in the loss, not k1, whose expected gradient is 0; kl_loss is null",
            {"algorithm.kl_loss": None},
        )
    return {"algorithm.kl_loss": {"kind": KL_KINDS[kind], "coefficient": coefficient}}


def convert_kl_reward(s: Settings) -> Mapping[str, object]:
    """Return the KL penalty in the rewards, or null; its kind is --kl-loss-type."""
    coefficient, kind = s.number("--kl-coef") or 0.0, algorithm_type(s)
    if not coefficient or kind in GROUPED:
        return {"algorithm.kl_reward": None}
    penalty = {"kind": KL_KINDS.get(s.text("--kl-loss-type") or "k1", "k1"), "coefficient": coefficient}
    values: dict[str, object] = {"algorithm.kl_reward": penalty}
    if kind == "reinforce_pp_baseline":
        raise NotConvertible(
            "slime subtracts the penalty of a token from its own advantage; megarl subtracts that of all tokens from "
            "the reward, before the baseline",
            values,
        )
    return values


def convert_returns(s: Settings) -> Mapping[str, object]:
    """Return gamma and lambda of the estimators that have them."""
    match algorithm_type(s):
        case "ppo":
            return {"algorithm.gamma": s.number("--gamma"), "algorithm.lam": s.number("--lambd")}
        case "reinforce_pp":
            return {"algorithm.gamma": s.number("--gamma")}
    return {}


def convert_correction(s: Settings) -> Mapping[str, object]:
    """Return the weights for the difference between engine and trainer, or null."""
    if not s.flag("--use-tis"):
        return {"algorithm.rollout_is": None}
    low, high = s.number("--tis-clip-low") or 0.0, s.number("--tis-clip") or 2.0
    function = s.text("--custom-tis-function-path")
    if function and function.endswith("icepop_function"):
        return {"algorithm.rollout_is": {"kind": "icepop", "low": low, "high": high}}
    values: dict[str, object] = {"algorithm.rollout_is": {"kind": "token_tis", "high": high}}
    if function:
        raise NotConvertible(f"{function}: megarl has token_tis, sequence_tis, icepop and geometric_mask", values)
    if low:
        raise NotConvertible(f"megarl's weights have no lower bound, which is {low:g} here", values)
    return values


def batch(s: Settings) -> tuple[int, int, int]:
    """Return (prompts, completions per prompt, mini-batches) of a step; --global-batch-size counts completions."""
    prompts, group = s.whole("--rollout-batch-size") or 1, s.whole("--n-samples-per-prompt") or 1
    steps, size = s.whole("--num-steps-per-rollout"), s.whole("--global-batch-size")
    if steps is None:
        steps = max(1, math.ceil(prompts * group / size)) if size else 1
    return prompts, group, steps


def convert_batch(s: Settings) -> Mapping[str, object]:
    """Return the sizes of a step and of its mini-batches."""
    prompts, group, num = batch(s)
    values = {"algorithm.prompts_per_step": prompts, "algorithm.group_size": group}
    if prompts % num or (prompts * group) % num:
        even = next((n for n in range(num, prompts + 1) if prompts % n == 0), prompts)
        raise NotConvertible(
            f"the completions of a prompt stay in one mini-batch: {prompts} prompts become {even} mini-batches, not "
            f"{num}",
            {**values, "algorithm.num_mini_batches": even},
        )
    return {**values, "algorithm.num_mini_batches": num}


def convert_steps(s: Settings) -> Mapping[str, object]:
    """Return the number of steps."""
    if (steps := s.whole("--num-rollout")) is None:
        raise NotConvertible("megarl counts steps: set trainer.steps to epochs * rows / prompts_per_step")
    return {"trainer.steps": steps}


def convert_sft_batch(s: Settings) -> Mapping[str, object]:
    """Return the samples of an optimizer step of supervised fine-tuning."""
    prompts, group, steps = batch(s)
    return {"trainer.batch_size": s.whole("--global-batch-size") or max(1, prompts * group // steps)}


def convert_sft_steps(s: Settings) -> Mapping[str, object]:
    """Return the number of optimizer steps of supervised fine-tuning."""
    if (rollouts := s.whole("--num-rollout")) is None:
        raise NotConvertible("megarl counts steps: set trainer.steps to epochs * rows / trainer.batch_size")
    return {"trainer.steps": rollouts * batch(s)[2]}


def convert_sft_save_interval(s: Settings) -> Mapping[str, object]:
    """Return the optimizer steps between checkpoints."""
    rollouts = s.whole("--save-interval")
    return {} if rollouts is None else {"checkpoint.every": rollouts * batch(s)[2]}


def convert_sft_function(s: Settings) -> Mapping[str, object]:
    """Return nothing where rows of the file are trained on.

    Raises:
        Refused: the run trains on samples of the policy.
        NotConvertible: a function of the user's makes what is trained on.
    """
    path = s.text("--rollout-function-path") or ""
    if path == SFT_FUNCTION:
        return {}
    if any(name in path for name in SAMPLING_FUNCTIONS):
        raise Refused(
            "--rollout-function-path",
            f"the run trains on completions that it samples; megarl sft trains on rows, as {SFT_FUNCTION} does",
        )
    raise NotConvertible("write what the function makes as rows of the file data.path, with their messages")


def convert_sft_loss(s: Settings) -> Mapping[str, object]:
    """Return nothing: the loss is a mean over tokens."""
    if not s.flag("--calculate-per-token-loss"):
        raise NotConvertible("megarl sft averages over all tokens of a step; slime averages over those of each sample")
    return {}


def convert_warmup(s: Settings) -> Mapping[str, object]:
    """Return the warm-up in optimizer steps."""
    fraction, updates = s.number("--lr-warmup-fraction"), (s.whole("--num-rollout") or 0) * batch(s)[2]
    if fraction is None:
        return {"trainer.optimizer.warmup_steps": s.whole("--lr-warmup-iters") or 0}
    decay = s.whole("--lr-decay-iters") or updates
    if not decay:
        raise NotConvertible(f"set trainer.optimizer.warmup_steps to {fraction:g} of the optimizer steps of the run")
    return {"trainer.optimizer.warmup_steps": round(fraction * decay)}


def convert_decay(s: Settings) -> Mapping[str, object]:
    """Return the shape of the decay; Megatron's default is linear, to --min-lr."""
    shape = (s.text("--lr-decay-style") or "linear").lower()
    if shape not in ("constant", "linear", "cosine"):
        raise NotConvertible(f"megarl has constant, linear and cosine, or a function of yours, not {shape}")
    return {"trainer.optimizer.decay": shape}


def optimizer_values(s: Settings, to: str) -> dict[str, object]:
    """Return the numbers of Adam, which policy and critic share."""
    keys = ("--lr", "--weight-decay", "--adam-beta1", "--adam-beta2", "--clip-grad")
    return {f"{to}.{name}": s.number(key) for name, key in zip(OPTIMIZER, keys, strict=True)}


def convert_optimizer_type(s: Settings) -> Mapping[str, object]:
    """Return the optimizer's type and own arguments."""
    kind = (s.text("--optimizer") or "adam").lower()
    if kind not in ("adam", "sgd"):
        raise NotConvertible(f"trainer.optimizer.type takes adam, sgd or a class of yours, not {kind}")
    if kind == "adam":
        return {}
    momentum = s.number("--sgd-momentum")
    kwargs = {} if momentum is None else {"trainer.optimizer.kwargs": {"momentum": momentum}}
    return {"trainer.optimizer.type": kind, **kwargs}


def convert_critic(s: Settings) -> Mapping[str, object]:
    """Return the critic's settings: slime gives it the policy's optimizer."""
    if algorithm_type(s) != "ppo":
        return {}
    values = optimizer_values(s, "algorithm.critic.optimizer")
    values["algorithm.critic.clip"] = s.number("--value-clip")
    if steps := s.whole("--num-critic-only-steps"):
        values["algorithm.critic.warmup_steps"] = steps
    return values


def convert_size(s: Settings, key: str) -> Mapping[str, object]:
    """Return a parallel size of the trainer, unless it is the default."""
    size, name = s.whole(key) or 1, SIZES[key]
    default = (s.whole("--tensor-model-parallel-size") or 1) if name == "etp" else 1
    return {} if size == default else {f"trainer.parallel.{name}": size}


def convert_sequence_parallel(s: Settings) -> Mapping[str, object]:
    """Return false where tensor parallelism goes without it."""
    tp = s.whole("--tensor-model-parallel-size") or 1
    off = tp > 1 and not s.flag("--sequence-parallel")
    return {"trainer.parallel.sequence_parallel": False} if off else {}


def convert_recompute(s: Settings) -> Mapping[str, object]:
    """Return which activations are computed again."""
    granularity = s.text("--recompute-granularity")
    if granularity is None:
        return {"trainer.recompute.granularity": "selective"} if s.flag("--recompute-activations") else {}
    values: dict[str, object] = {"trainer.recompute.granularity": granularity}
    if granularity == "full":
        values["trainer.recompute.method"] = s.text("--recompute-method") or "uniform"
        values["trainer.recompute.layers"] = s.whole("--recompute-num-layers") or 1
    elif modules := s.texts("--recompute-modules"):
        values["trainer.recompute.modules"] = modules
    return values


def convert_micro_batch(s: Settings) -> Mapping[str, object]:
    """Return the tokens of a micro-batch, over all context-parallel ranks."""
    to = "trainer.max_tokens_per_micro_batch"
    cp = s.whole("--context-parallel-size") or 1
    if s.flag("--use-dynamic-batch-size") and (tokens := s.whole("--max-tokens-per-gpu")):
        return {to: tokens * cp}
    length = s.whole("--rollout-max-context-len") or s.whole("--rollout-max-response-len")
    if length is None:
        raise NotConvertible(f"the micro-batch is given in samples: {to} is the default")
    samples = s.whole("--micro-batch-size") or 1
    raise NotConvertible(
        f"the micro-batch is given in samples: {to} is {samples} of the longest response; add the prompts' tokens",
        {to: samples * length},
    )


def convert_aux_loss(s: Settings) -> Mapping[str, object]:
    """Return the load-balancing loss of the routers."""
    coefficient = s.number("--moe-aux-loss-coeff") or 0.0
    scopes = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence", "global_aux_loss": "global_batch"}
    kind = s.text("--moe-router-load-balancing-type") or "aux_loss"
    if not coefficient or kind == "none":
        return {}
    if kind not in scopes:
        raise NotConvertible(f"megarl has {', '.join(scopes)}, not {kind}")
    return {"trainer.moe.aux_loss_coeff": coefficient, "trainer.moe.aux_loss_scope": scopes[kind]}


def convert_router_replay(s: Settings) -> Mapping[str, object]:
    """Return where experts come from when a step passes over a token again."""
    if s.flag("--use-rollout-routing-replay"):
        return {"trainer.moe.router_replay": "R3"}
    return {"trainer.moe.router_replay": "R2"} if s.flag("--use-routing-replay") else {}


def convert_field(s: Settings, part: Part, key: str) -> Mapping[str, object]:
    """Return a field of one of megatron-core's configurations, which Megatron's argument of the same name sets."""
    name, value = key.removeprefix("--").replace("-", "_"), s.value(key)
    if problem := next(find_field_problems(part, {name: value}), None):
        raise NotConvertible(problem)
    return {f"trainer.megatron.{part}.{name}": value}


def is_colocated(s: Settings) -> bool:
    """Whether engines share the trainer's GPUs."""
    return s.flag("--colocate")


def engine_tp(s: Settings) -> int:
    """Return the tensor-parallel size of an engine; one that shares the trainer's GPUs fits on a node."""
    wanted = s.whole("--rollout-num-gpus-per-engine") or 1
    return min(wanted, s.whole("--actor-num-gpus-per-node") or 8) if is_colocated(s) else wanted


def convert_slots(s: Settings) -> Mapping[str, object]:
    """Return the slots of trainer and engines, and the engines that fill theirs."""
    nodes, per_node = s.whole("--actor-num-nodes") or 1, s.whole("--actor-num-gpus-per-node") or 8
    values: dict[str, object] = {"placement.nodes": nodes, "placement.slots_per_node": per_node}
    wanted, total = s.whole("--rollout-num-gpus-per-engine") or 1, nodes * per_node
    tp = engine_tp(s)
    if not is_colocated(s):
        total, on_node = s.whole("--rollout-num-gpus") or per_node, s.whole("--num-gpus-per-node") or 8
        pool_nodes = max(1, math.ceil(total / on_node))
        values["placement.pools.engines"] = {"nodes": pool_nodes, "slots_per_node": max(1, total // pool_nodes)}
        values["placement.rollout.pool"] = "engines"
    values |= {"rollout.tp": tp, "rollout.replicas": max(1, total // tp)}
    if tp != wanted:
        raise NotConvertible(f"engines that share the trainer's GPUs fit on one node: tp {wanted} becomes {tp}", values)
    return values


def convert_engine_options(s: Settings) -> Mapping[str, object]:
    """Return arguments of SGLang, which slime has with the prefix --sglang-."""
    values: dict[str, object] = {}
    problems = []
    for setting in s.matching("--sglang-*"):
        name = setting.key.removeprefix("--sglang-").replace("-", "_")
        if setting.unknown or name in ("mem_fraction_static", "max_running_requests", "enable_fp32_lm_head"):
            continue
        if name in ("ep_size", "expert_parallel_size") and setting.value not in (1, engine_tp(s)):
            values["rollout.engine.extra_args.ep_size"] = engine_tp(s)
            problems.append(f"ep_size needs to be 1 or the engine's tp: {setting.value} becomes {engine_tp(s)}")
        elif problem := next(find_option_problems({name: setting.value}), None):
            problems.append(problem)
        else:
            values[f"rollout.engine.extra_args.{name}"] = setting.value
    if problems:
        raise NotConvertible("; ".join(problems), values)
    return values


def schedule_type(s: Settings) -> str:
    """Return `schedule.type` of the script that is started."""
    if "fully_async" in (s.text("--rollout-function-path") or ""):
        return "async"
    return "one_step_off" if (s.text(ENTRY_KEY) or "").endswith("train_async.py") else "sync"


def convert_schedule(s: Settings) -> Mapping[str, object]:
    """Return how far generation runs ahead of training."""
    kind = schedule_type(s)
    if kind == "sync":
        return {}
    interval = s.whole("--update-weights-interval") or 1
    if kind == "one_step_off" and interval > 1:
        raise NotConvertible(
            f"megarl pushes weights after each step, not after {interval}", {"schedule.type": "one_step_off"}
        )
    return {"schedule.type": kind}


def convert_rewards(s: Settings) -> Mapping[str, object]:
    """Return the reward term: a function of the user's, a service, or the comparison of answers."""
    if path := s.text("--custom-rm-path"):
        module, _, name = path.rpartition(".")
        term: dict[str, object] = {"type": "python", "path": f"{module}:{name}"}
        if s.flag("--group-rm"):
            term["per"] = "group"
        return {"reward.terms.reward": term}
    kind = (s.text("--rm-type") or "").removeprefix("boxed_")
    if url := s.text("--rm-url"):
        return {"reward.terms.reward": {"type": "http", "url": url}}
    values = {"reward.terms.accuracy": {"type": "math"}}
    if kind and kind not in MATH_REWARDS:
        raise NotConvertible(f"megarl has no reward {kind}: write it as type: python; it is math here", values)
    return values


def convert_turns(s: Settings) -> Mapping[str, object]:
    """Return an agent of the user's, where slime generates by a function of the user's."""
    path = s.text("--custom-generate-function-path")
    if path is None:
        return {}
    module, _, name = path.rpartition(".")
    raise NotConvertible(
        f"write {path} as an async function run(episode), and check rollout.agent.path",
        {"rollout.agent.path": f"{module}:{name}"},
    )


def convert_prompt_data(s: Settings) -> Mapping[str, object]:
    """Return the file of training rows, of which slime may take a slice."""
    path = s.text("--prompt-data")
    if path is None or (match := SLICE.fullmatch(path)) is None:
        return {} if path is None else {"data.path": path}
    rows = f"{match['start']}:{match['end']}"
    raise NotConvertible(
        f"megarl trains on the whole file: write the rows [{rows}] to a file of their own", {"data.path": match["path"]}
    )


def convert_eval_data(s: Settings) -> Mapping[str, object]:
    """Return the file of held-out rows; slime takes pairs of a name and a path, which may end in a slice of rows."""
    names = s.texts("--eval-prompt-data")
    paths = names[1::2] if len(names) > 1 else names
    if not paths:
        return {}
    match = SLICE.fullmatch(paths[0])
    values: dict[str, object] = {"data.eval_path": match["path"] if match else paths[0]}
    if match and match["start"] in ("", "0") and match["end"].isdecimal() and int(match["end"]):
        values["data.eval_size"] = int(match["end"])
    elif match:
        rows = f"{match['start']}:{match['end']}"
        raise NotConvertible(f"megarl evaluates on the first rows of a file: write the rows [{rows}] to one", values)
    if len(paths) > 1:
        raise NotConvertible("megarl evaluates on one file: concatenate them", values)
    return values


def convert_eval_sampling(s: Settings) -> Mapping[str, object]:
    """Return the completions per held-out prompt."""
    samples, own, training = (
        s.whole("--n-samples-per-eval-prompt") or 1,
        s.number("--eval-temperature"),
        s.number("--rollout-temperature"),
    )
    values: dict[str, object] = {"eval.samples": samples} if samples > 1 else {}
    if samples == 1 and own != 0:
        raise NotConvertible("megarl evaluates one completion greedily, and several at random", values)
    if samples > 1 and own is not None and own != training:
        raise NotConvertible(f"megarl evaluates with rollout.sampling.temperature, not with {own:g}", values)
    return values


def convert_run_dir(s: Settings) -> Mapping[str, object]:
    """Return the folder of the run: that of --save."""
    return {"run_dir": s.text("--save") or "runs/slime"}


def convert_model_path(s: Settings) -> Mapping[str, object]:
    """Return the folder in Hugging Face format that trainer and engines read."""
    path = s.text("--hf-checkpoint")
    if path is None:
        raise NotConvertible("--hf-checkpoint is not known: set model.path", {"model.path": "MODEL"})
    if re.search(r"(?i)fp8|int4|awq", PurePosixPath(path).name):
        raise NotConvertible(
            "the engines' weights look quantized: megarl trains and serves the folder model.path", {"model.path": path}
        )
    return {"model.path": path}


def convert_wandb(s: Settings) -> Mapping[str, object]:
    """Return the project and name in Weights & Biases."""
    if not s.flag("--use-wandb"):
        return {}
    section = {"project": s.text("--wandb-project") or "slime", "name": s.text("--wandb-group")}
    return {"tracking.wandb": {key: value for key, value in section.items() if value is not None}}


def convert_template_kwargs(s: Settings) -> Mapping[str, object]:
    """Return variables of the chat template.

    Raises:
        NotConvertible: the argument is no object of JSON.
    """
    values = s.value("--apply-chat-template-kwargs")
    if not isinstance(values, dict):
        raise NotConvertible(f"needs an object of JSON, got {values!r}")
    return {f"data.chat_template_kwargs.{name}": value for name, value in values.items() if value is not None}
