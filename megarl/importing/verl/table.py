"""verl's keys and what they are in megarl, and the settings that a run of verl gives.

The keys are those of the present trainer and of `main_ppo` since version 0.5. A run is a launch script with Hydra
overrides, or a YAML file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megarl.config.load import find_leaves
from megarl.errors import ConfigError
from megarl.importing.shell_script import Word, find_launch_command
from megarl.importing.tables import Difference, PeerTable, Setting
from megarl.importing.verl import data_and_rewards as data
from megarl.importing.verl import loss_settings as loss
from megarl.importing.verl import run_layout as layout
from megarl.importing.verl.hydra_values import parse_value, resolve_all
from megarl.importing.verl.loss_settings import ACTOR, CORRECTION
from megarl.importing.verl.run_keys import DATA, ENGINES
from megarl.importing.verl.run_layout import ENTRY_KEY, MEGATRON, MODEL, ROLLOUT
from megarl.importing.verl.training_keys import BATCHES, CRITIC, LOSS, OPTIMIZER, PARALLEL

DEFAULTS: Mapping[str, object] = {
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{MODEL}.path": "~/models/deepseek-llm-7b-chat",
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.optim.betas": [0.9, 0.999],
    f"{ACTOR}.optim.clip_grad": 1.0,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.lr_warmup_steps": -1,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.use_kl_loss": False,
    f"{MEGATRON}.sequence_parallel": True,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.val_kwargs.temperature": 0.0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10_000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_penalty": "kl",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.pf_ppo.reweight_method": "pow",
    "algorithm.pf_ppo.weight_pow": 2.0,
    "algorithm.use_kl_in_reward": False,
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    "critic.cliprange_value": 0.5,
    "critic.megatron.sequence_parallel": True,
    "critic.optim.betas": [0.9, 0.999],
    "critic.optim.clip_grad": 1.0,
    "critic.optim.lr": 1e-5,
    "critic.optim.lr_warmup_steps": -1,
    "critic.optim.weight_decay": 0.01,
    "custom_reward_function.name": "compute_score",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.shuffle": True,
    "data.train_batch_size": 1024,
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.truncation": "error",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "reward.reward_manager.name": "naive",
    "reward_model.reward_manager": "naive",
    "async_training.require_batches": 1,
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "trainer.experiment_name": "gsm8k",
    "trainer.logger": ["console", "wandb"],
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.project_name": "verl_examples",
    "trainer.resume_mode": "auto",
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.total_epochs": 30,
    "trainer.use_v1": True,
    "trainer.v1.sampler.max_off_policy_strategy": "drop",
    "trainer.v1.sampler.max_off_policy_threshold": 8,
    "trainer.v1.trainer_mode": "sync",
    "trainer.val_before_train": True,
}
"""Defaults of `ppo_trainer.yaml` and the files that it is composed of, and of the fully asynchronous trainer."""

DIFFERENCES: Sequence[Difference] = (
    Difference(
        text="Warm-up: update i of W has i / W of the peak learning rate in megarl; verl's first update has 0.",
        applies=lambda s: bool(layout.updates_per_step(s)) and any(s.matching("*.lr_warmup_steps*")),
    ),
    Difference(
        text="Schedules of the learning rate advance once per optimizer step in megarl, once per training step in "
        "verl: warm-up steps were multiplied by num_mini_batches * ppo_epochs.",
        applies=lambda s: layout.updates_per_step(s) > 1 and any(s.matching("*.optim.lr_*")),
    ),
    Difference(
        text="Denominators of aggregations are counted over the mini-batch, all ranks and micro-batches; earlier "
        "versions of verl average micro-batches.",
    ),
    Difference(
        text="FSDP shards weights over all GPUs; megarl shards them by trainer.parallel, whose tp and pp are 1 here: "
        "`megarl check --gpu NAME` prints what fits.",
        applies=lambda s: not layout.uses_megatron(s),
    ),
    Difference(
        text="Engines are SGLang's; sampled tokens and speed differ from vLLM's.",
        applies=lambda s: s.text(f"{ROLLOUT}.name") not in ("sglang", None),
    ),
    Difference(
        text="gpu_memory_utilization was copied to rollout.engine.mem_fraction, a share of the memory that is free "
        "when the engine starts: remove it to let megarl compute it.",
        applies=lambda s: s.is_given(f"{ROLLOUT}.gpu_memory_utilization"),
    ),
    Difference(
        text="verl chooses its reward by the column data_source; megarl compares the final answer with "
        "reward_model.ground_truth as mathematics. Choose other terms for other data.",
        applies=lambda s: not any(s.text(f"{key}.path") for key in data.REWARD_FUNCTIONS),
    ),
    Difference(
        text="A reward function is called as score(trajectory, text, row), row with all columns, instead of "
        "compute_score(data_source, solution_str, ground_truth, extra_info): change its arguments. Its module needs "
        "to be importable where the run starts.",
        applies=lambda s: any(s.text(f"{key}.path") for key in data.REWARD_FUNCTIONS),
    ),
    Difference(
        text="The loss cispo of verl also bounds the weight from below at 1 - clip_ratio_low; megarl does not.",
        applies=lambda s: s.text(loss.LOSS_MODE) == "cispo" and (s.number(f"{ACTOR}.clip_ratio_low") or 0) < 1,
    ),
    Difference(
        text="Tokens that rollout_rs masks still count in megarl's means; verl leaves them out.",
        applies=lambda s: s.text(f"{CORRECTION}.rollout_rs") not in (None, "null"),
    ),
    Difference(
        text="DAPO: a step that finds too few groups with a signal is trained on those it has; verl raises an error.",
        applies=lambda s: s.flag("algorithm.filter_groups.enable"),
    ),
    Difference(
        text="A run compares log-probabilities of engine and trainer at every step and stops if they disagree, see "
        "limits.",
    ),
    Difference(
        text="A run does not resume by itself: use `megarl train CONFIG --resume auto`.",
        applies=lambda s: s.text("trainer.resume_mode") == "auto",
    ),
    Difference(
        text="bypass_mode: verl takes the engine's log-probabilities as those of the old policy; megarl computes them "
        "with the trainer's weights before the step's first update, and corrects with algorithm.rollout_is.",
        applies=loss.bypasses,
    ),
    Difference(
        text="Staleness counts weight syncs, one per step; verl's staleness_threshold is a share of a batch.",
        applies=layout.is_fully_async,
    ),
)

VERL = PeerTable(
    name="verl",
    repository="https://github.com/verl-project/verl",
    versions="August 2026, commit `1dda039b9c63`, and the keys of `main_ppo` since version 0.5",
    topics={
        "Batches and lengths": BATCHES,
        "Loss and algorithm": LOSS,
        "Critic": CRITIC,
        "Optimizer, parallelism, memory": (*OPTIMIZER, *PARALLEL),
        "Engines, schedule, rewards, agents": ENGINES,
        "Data, checkpoints, logs": DATA,
    },
    defaults=DEFAULTS,
    differences=DIFFERENCES,
    abbreviations={MEGATRON: "MEG", "actor_rollout_ref": "ARR"},
)


ENTRY = re.compile(
    r"(verl|recipe)\.[\w.]*(main_\w+|fully_async_main|main)$|(^|/)(main_ppo|main_dapo|fully_async_main)\.py$"
)
OVERRIDE = re.compile(r"(\+\+|\+|~)?([\w.@/*-]+)=(.*)", re.DOTALL)
OPTIONS = ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd")


def read_run(text: str, path: Path, variables: Mapping[str, str]) -> tuple[dict[str, Setting], list[str]]:
    """Return the settings by key, and notes on the reading.

    Raises:
        ConfigError: an override is malformed, or no command starts verl.
        DataError: the script is malformed.
    """
    notes: list[str] = []
    if path.suffix in (".yaml", ".yml"):
        given = {setting.key: setting for setting in _read_yaml(text, path, notes)}
    else:
        command = find_launch_command(text, path, lambda word: bool(ENTRY.search(word)), variables=variables)
        notes += command.notes
        given = _read_arguments(command.arguments, path, notes)
        entry = command.words[command.entry]
        given[ENTRY_KEY] = Setting(key=ENTRY_KEY, value=entry.text, origin=entry.where)
    return resolve_all(given, DEFAULTS), notes


def _read_arguments(words: Sequence[Word], path: Path, notes: list[str]) -> dict[str, Setting]:
    overrides: list[Word] = []
    options: dict[str, str] = {}
    pending = ""
    for word in words:
        name, equals, value = word.text.partition("=")
        if pending:
            options[pending], pending = word.text, ""
        elif name in OPTIONS:
            options[name] = value
            pending = "" if equals else name
        else:
            overrides.append(word)
    given = {setting.key: setting for setting in _read_config_files(options, path, notes)}
    for word in overrides:
        _apply(word, given, notes)
    return given


def _read_config_files(options: Mapping[str, str], path: Path, notes: list[str]) -> Iterator[Setting]:
    """Yield the settings of the file that `--config-path` and `--config-name` name, if it is there."""
    name = options.get("--config-name") or options.get("-cn")
    folder = next((options[o] for o in ("--config-path", "-cp", "--config-dir", "-cd") if o in options), None)
    if name is None or re.fullmatch(r"\w*ppo(_megatron)?_trainer", name.removesuffix(".yaml")):
        return
    candidates = [Path(folder or "."), path.parent / (folder or ".")]
    file = next((f for base in candidates if (f := base / f"{name.removesuffix('.yaml')}.yaml").is_file()), None)
    if file is None:
        notes.append(
            f"{path.name} starts from the configuration {name} in {folder or 'its default folder'}, which was not "
            "found: its keys are those of verl's defaults here"
        )
        return
    yield from _read_yaml(file.read_text(encoding="utf-8"), file, notes)


def _read_yaml(text: str, path: Path, notes: list[str]) -> Iterator[Setting]:
    for key, value, line in find_leaves(text, str(path)):
        if key == "defaults":
            notes.append(f"{path.name}:{line}: defaults {value!r}: keys that are not given have verl's defaults")
        elif not key.startswith("hydra.") and key.rpartition(".")[2] != "_target_":
            yield Setting(key=key, value=value, origin=f"{path.name}:{line}")


def _apply(word: Word, given: dict[str, Setting], notes: list[str]) -> None:
    """Apply one override, such as `a.b=1`, `+a.b=1`, `++a.b=1` or `~a.b`."""
    origin = word.where
    if word.text.startswith("~"):
        for key in [key for key in given if key == word.text[1:] or key.startswith(f"{word.text[1:]}.")]:
            del given[key]
        return
    match = OVERRIDE.fullmatch(word.text)
    if not match:
        if word.text.strip() and not word.unknown:
            notes.append(f"{origin}: {word.text!r} is no override key=value, and was not read")
        return
    key, text = match.group(2).partition("@")[0] if "@" in match.group(2) else match.group(2), match.group(3)
    if "@" in match.group(2):
        notes.append(f"{origin}: {word.text} chooses a group of keys, which have verl's defaults here")
        return
    if key.startswith("hydra."):
        return
    try:
        value: object = text if word.unknown else parse_value(text)
    except ValueError as e:
        raise ConfigError(f"{origin}: {key}={text} is not valid: {e}") from e
    for leaf, item in _leaves(key, value):
        given.pop(leaf, None)  # the last value comes last
        given[leaf] = Setting(key=leaf, value=item, origin=origin, unknown=word.unknown)


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key, value
