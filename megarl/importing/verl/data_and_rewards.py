"""Conversion of verl's keys of data, rewards, agents, evaluation, checkpoints and logs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from megarl.importing.tables import NotConvertible, Settings
from megarl.importing.verl.run_layout import ROLLOUT

REWARD_FUNCTIONS = ("custom_reward_function", "reward.custom_reward_function")
REWARD_MODELS = ("reward_model", "reward.reward_model")
TO_WRITE = "your_package"
"""Package in import paths that the user has to write."""


def convert_train_files(s: Settings) -> Mapping[str, object]:
    """Return the training file, or a source for each of several files."""
    files = s.texts("data.train_files")
    if len(files) == 1:
        return {"data.path": files[0]}
    if not files:
        return {}
    held_out = s.texts("data.val_files")
    share, values = round(1 / len(files), 4), dict[str, object]()
    for i, (name, file) in enumerate(zip(_names(files), files, strict=True)):
        last = i == len(files) - 1
        ratio = round(1 - share * (len(files) - 1), 4) if last else share
        source: dict[str, object] = {"path": file, "ratio": ratio}
        if len(held_out) == len(files):
            source["eval_path"] = held_out[i]
        values[f"data.sources.{name}"] = source
    raise NotConvertible(
        f"verl concatenates files; megarl draws from {len(files)} sources in fixed shares, which are equal here: set "
        "each ratio to the rows of its file divided by all rows",
        values,
    )


def _names(files: list[str]) -> list[str]:
    """Return a name for each file: its stem, with its folder where stems are equal."""
    paths = [PurePosixPath(file) for file in files]
    stems = [path.stem for path in paths]
    named = [p.stem if stems.count(p.stem) == 1 else f"{p.parent.name}-{p.stem}" for p in paths]
    names = [re.sub(r"\W", "_", name) for name in named]
    return [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]


def convert_val_files(s: Settings) -> Mapping[str, object]:
    """Return the file of held-out rows."""
    files, sources = s.texts("data.val_files"), s.texts("data.train_files")
    if not files or len(files) == len(sources) > 1:
        return {}
    if len(sources) > 1:
        raise NotConvertible("with several sources, each has its own eval_path: give each source its held-out rows")
    if len(files) > 1:
        raise NotConvertible("megarl evaluates on one file: concatenate them", {"data.eval_path": files[0]})
    return {"data.eval_path": files[0]}


def convert_fields(s: Settings) -> Mapping[str, object]:
    """Return the fields of verl's rows."""
    prompt = s.text("data.prompt_key") or "prompt"
    return {"data.fields.prompt": prompt, "data.fields.answer": "reward_model.ground_truth"}


def convert_overlong_prompts(s: Settings) -> Mapping[str, object]:
    """Return what becomes of prompts that are too long."""
    return {"data.overlong_prompts": "drop" if s.flag("data.filter_overlong_prompts") else "error"}


def convert_rewards(s: Settings) -> Mapping[str, object]:
    """Return the reward terms: a function of the user's, a reward model, or the comparison of answers."""
    values: dict[str, object] = {}
    for key in REWARD_MODELS:
        path = s.text(f"{key}.model_path") or (s.text(f"{key}.model.path") if s.is_given(f"{key}.model.path") else None)
        if s.flag(f"{key}.enable") and path:
            values["reward.terms.reward_model"] = {"type": "model", "path": path}
    for key in REWARD_FUNCTIONS:
        if file := s.text(f"{key}.path"):
            name = s.text(f"{key}.name") or "compute_score"
            module = re.sub(r"\W", "_", PurePosixPath(file).stem)
            values["reward.terms.reward"] = {"type": "python", "path": f"{module}:{name}"}
    if "reward.terms.reward" not in values:  # evaluation needs a rule
        values["reward.terms.accuracy"] = {"type": "math", "weight": 0} if values else {"type": "math"}
    return values


def convert_turns(s: Settings) -> Mapping[str, object]:
    """Return an environment of the user's, which has the tools of a run with several turns."""
    head = f"{ROLLOUT}.multi_turn"
    loop = s.text(f"{ROLLOUT}.agent.default_agent_loop") or "single_turn_agent"
    has_tools = any(s.text(f"{head}.{key}") for key in ("tool_config_path", "function_tool_path"))
    if not (s.flag(f"{head}.enable") or has_tools or loop == "tool_agent"):
        if loop == "single_turn_agent":
            return {}
        raise NotConvertible(
            f"write the agent loop {loop} as an async function run(episode), and check rollout.agent.path",
            {"rollout.agent.path": f"{TO_WRITE}.agent:run"},
        )
    turns = s.whole(f"{head}.max_assistant_turns") or s.whole(f"{head}.max_user_turns") or s.whole(f"{head}.max_turns")
    values: dict[str, object] = {"rollout.env.path": f"{TO_WRITE}.tools:Tools"}
    if turns:
        values["rollout.env.max_turns"] = turns
    raise NotConvertible(
        "write the tools as an environment, a class with reset(task), step(reply) and close(), and check "
        "rollout.env.path and rollout.env.max_turns",
        values,
    )


def convert_val_samples(s: Settings) -> Mapping[str, object]:
    """Return the completions per held-out prompt."""
    samples, samples_at_random = s.whole(f"{ROLLOUT}.val_kwargs.n") or 1, s.flag(f"{ROLLOUT}.val_kwargs.do_sample")
    values: dict[str, object] = {"eval.samples": samples} if samples > 1 else {}
    own, temperature = s.number(f"{ROLLOUT}.val_kwargs.temperature"), s.number(f"{ROLLOUT}.temperature")
    if samples > 1 and own != temperature:
        raise NotConvertible(
            f"megarl evaluates with rollout.sampling.temperature = {temperature:g}, not with {own or 0:g}", values
        )
    if samples == 1 and samples_at_random:
        raise NotConvertible("megarl evaluates one completion greedily, and several at random", values)
    return values


def convert_sampling(s: Settings) -> Mapping[str, object]:
    """Return the temperature; top_p and top_k need to leave all tokens."""
    if (temperature := s.number(f"{ROLLOUT}.temperature")) is None:
        return {}
    return {"rollout.sampling.temperature": temperature}


def convert_truncated_sampling(s: Settings) -> Mapping[str, object]:
    """Return nothing where all tokens can be sampled."""
    top_p, top_k = s.number(f"{ROLLOUT}.top_p"), s.whole(f"{ROLLOUT}.top_k")
    if top_p in (None, 1.0) and top_k in (None, -1, 0):
        return {}
    raise NotConvertible(
        "megarl samples from the full distribution, to which ratios and log-probabilities refer: top_p is 1 and top_k "
        "is -1"
    )


def convert_run_dir(s: Settings) -> Mapping[str, object]:
    """Return the folder of the run."""
    folder = s.text("trainer.default_local_dir") if "trainer.default_local_dir" in s.given else None
    return {"run_dir": folder or f"runs/{s.text('trainer.project_name')}/{s.text('trainer.experiment_name')}"}


def convert_logger(s: Settings) -> Mapping[str, object]:
    """Return the outputs for metrics."""
    loggers = s.texts("trainer.logger")
    values: dict[str, object] = {"tracking.tensorboard": "tensorboard" in loggers}
    if "wandb" in loggers:
        values["tracking.wandb"] = {
            "project": s.text("trainer.project_name"),
            "name": s.text("trainer.experiment_name"),
        }
    others = [name for name in loggers if name not in ("console", "wandb", "tensorboard", "file")]
    if others:
        raise NotConvertible(f"megarl has no logger {', '.join(others)}; tracking.sinks takes a class of yours", values)
    return values


def convert_frequency(s: Settings, key: str, to: str) -> Mapping[str, object]:
    """Return a number of steps; verl's -1, never, is 0."""
    return {to: max(0, s.whole(key) or 0)}


def convert_save_contents(s: Settings) -> Mapping[str, object]:
    """Return whether checkpoints have the model in Hugging Face format too."""
    key = "actor_rollout_ref.actor.checkpoint.save_contents"
    return {"checkpoint.hf": True} if s.is_given(key) and "hf_model" in s.texts(key) else {}
