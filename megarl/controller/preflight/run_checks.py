"""Preflight checks of a run: find all problems of a configuration in one pass, before any worker starts.

Each problem is one line that starts with its YAML key and, if numbers conflict, shows the arithmetic.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, cast

from megarl.cluster.placement.assign import ClusterNode
from megarl.config.reward import CodeRewardConfig, FormatRewardConfig, JudgeRewardConfig, PythonRewardConfig
from megarl.config.rollout import AgentConfig, EnvironmentConfig, HarnessConfig
from megarl.config.run import DpoConfig, RunConfig, StageConfig
from megarl.config.trainer import OptimizerConfig, load_decay
from megarl.controller.preflight.data_checks import find_batch_problems, find_data_problems, find_test_case_problems
from megarl.controller.preflight.data_report import FileReport
from megarl.controller.preflight.machine_checks import (
    find_allocation_problems,
    find_device,
    find_engine_placement_problems,
    find_engine_variable_problems,
    find_folder_problems,
    find_local_gpu_problems,
    find_local_gpu_types,
    find_package_problems,
    find_port_problems,
    find_profile_problems,
    find_schedule_problems,
)
from megarl.controller.preflight.model_checks import (
    find_auxiliary_model_problems,
    find_family_problems,
    find_model_problems,
    find_reference_problems,
    will_write_model,
    write_missing_model,
)
from megarl.controller.preflight.weight_sync_checks import find_delta_problems, find_stall_problems
from megarl.data.tokenizer import load_tokenizer
from megarl.engines.custom_engine import check_engine
from megarl.errors import ConfigError, DataError
from megarl.megatron.families.load_architecture import read_hf_config
from megarl.reward.python_function import check_reward
from megarl.reward.services import check_judge_pattern
from megarl.reward.terms import compile_pattern
from megarl.rollout.agents.agent import check_agent
from megarl.rollout.environments.conversation import make_renderers
from megarl.rollout.environments.environment import check_environment
from megarl.rollout.gateway.harness_process import HARNESS, check_harness
from megarl.run.schedule.settings import SchedulePolicy, TailStats
from megarl.sandbox.tiers import choose_tier
from megarl.tracking.tracker import METRICS_FILE, check_sink


def find_agent_problems(config: RunConfig) -> Iterator[str]:
    """Find out whether the agent, environment or harness cannot be imported or called; a class is not created."""
    try:
        check_agent(config.rollout.agent)
    except ConfigError as e:
        yield str(e)
    for key, env in config.environments.items():
        try:
            check_environment(env, key)
        except ConfigError as e:
            yield str(e)
        yield from _find_template_problems(config, env, key)
    harness = config.rollout.harness
    if harness is not None:
        try:
            check_harness(harness)
        except ConfigError as e:
            yield str(e)
        yield from _find_template_problems(config, harness, HARNESS)
    terms = config.reward.environments
    if terms and not config.environments and harness is None and config.rollout.agent == AgentConfig():
        yield (
            f"reward.terms.{terms[0]} is of type environment, which needs rollout.env, or an agent or harness that "
            "gives rewards of turns"
        )
    if config.algorithm.advantages_per == "turn" and not terms:
        yield (
            "algorithm.advantages_per: turn needs a term of type environment in reward.terms, which adds up the "
            f"rewards of turns, got {', '.join(config.reward.terms)}"
        )


def _find_template_problems(config: RunConfig, section: EnvironmentConfig | HarnessConfig, key: str) -> Iterator[str]:
    run_by_default = config.rollout.env or config.rollout.harness
    for source in config.data.resolved_sources:
        is_used = (source.config.env or run_by_default) is section
        if is_used and source.config.chat_template == "never":
            yield f"{key} needs a chat template, got {source.key}.chat_template: never"
        if is_used and source.config.last_assistant == "continue":
            yield f"{source.key}.last_assistant: continue is for prompts without {key}, which begins with a new turn"
    if not Path(config.model.path).is_dir():
        return  # reported with the model
    try:
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        make_renderers(config.data, tokenizer, section, refuses_forks=config.algorithm.refuses_forks, key=key)
    except DataError as e:
        yield str(e)


def find_reward_problems(config: RunConfig) -> Iterator[str]:
    """Find reward terms whose regular expression, Python function, sandbox or test cases cannot be used."""
    for name, term in config.reward.terms.items():
        key = f"reward.terms.{name}"
        try:
            match term:
                case FormatRewardConfig():
                    compile_pattern(term.pattern, key=f"{key}.pattern")
                case PythonRewardConfig():
                    check_reward(term, key=key)
                case CodeRewardConfig():
                    choose_tier(term.sandbox, key=f"{key}.sandbox")
                case JudgeRewardConfig():
                    check_judge_pattern(term, key=key)
        except ConfigError as e:
            yield str(e)
    yield from find_test_case_problems(config)


def find_engine_problems(config: RunConfig) -> Iterator[str]:
    """Find out whether an engine outside the package cannot be imported or called; none is created."""
    if config.rollout.engine.is_custom:
        try:
            check_engine(config.rollout.engine)
        except ConfigError as e:
            yield str(e)


def find_sink_problems(config: StageConfig) -> Iterator[str]:
    """Find classes of `tracking.sinks` that cannot be imported or called."""
    for number, sink in enumerate(config.tracking.sinks):
        try:
            check_sink(sink, f"tracking.sinks.{number}")
        except ConfigError as e:
            yield str(e)


def find_decay_problems(config: StageConfig) -> Iterator[str]:
    """Find functions of `optimizer.decay` that cannot be imported, or return other values than shares."""
    for key, optimizer, _ in optimizers_of(config):
        try:
            load_decay(optimizer.decay, key=f"{key}.decay")
        except ConfigError as e:
            yield str(e)


def find_optimizer_problems(config: StageConfig) -> Iterator[str]:
    """Find classes of `optimizer.type` that cannot be imported or called, or whose state checkpoints cannot hold."""
    layouts = {f"{model.key}.optimizer": model.parallel for model in config.auxiliary_models}
    for key, optimizer, _ in optimizers_of(config):
        if optimizer.is_adam:
            continue
        from megarl.megatron.training.optimizer_class import load_optimizer  # imports torch

        try:
            load_optimizer(optimizer, config.trainer.megatron, layouts.get(key, config.trainer.parallel), key=key)
        except ConfigError as e:
            yield str(e)


def check_or_raise(
    config: StageConfig, nodes: Sequence[ClusterNode] | None = None, reports: list[FileReport] | None = None
) -> None:
    """Return if `check_run` finds no problems.

    Args:
        nodes: nodes that the run will have; None: this node, or those of the cluster at RAY_ADDRESS.
        reports: receives the report of each data file; None: none is made, which saves the time.

    Raises:
        ConfigError: all problems, one per line.
    """
    problems = check_run(config, nodes, reports)
    if problems:
        raise ConfigError("\n".join(problems))


class Subject:
    """A configuration that is checked, and what several checks read about it, each found at its first use."""

    def __init__(
        self, config: StageConfig, nodes: Sequence[ClusterNode] | None, reports: list[FileReport] | None
    ) -> None:
        """`nodes`, `reports`: as in `check_or_raise`."""
        self.config, self.nodes, self.reports = config, nodes, reports
        self.problems: list[str] = []
        """Those that were found so far."""

    @property
    def run(self) -> RunConfig:
        """The configuration of `megarl train`."""
        assert isinstance(self.config, RunConfig)
        return self.config

    @cached_property
    def device(self) -> str | None:
        """The device of the trainer, as far as it is known."""
        return find_device(self.config.placement, self.nodes)

    @cached_property
    def family_problems(self) -> list[str]:
        """Problems of `model.family`; models cannot be read without theirs."""
        return [*find_family_problems(self.config)]

    @cached_property
    def hf_config(self) -> dict[str, Any] | str:
        """The content of the model's config.json, or why it cannot be read."""
        try:
            return read_hf_config(Path(self.config.model.path))
        except DataError as e:
            return f"model.path: {e}"

    def has(self, need: Need) -> bool:
        """Return whether there is what a check needs."""
        match need:
            case "train":
                return isinstance(self.config, RunConfig)
            case "dpo":
                return isinstance(self.config, DpoConfig)
            case "here":
                return self.nodes is None
            case "cluster":
                return self.nodes is not None
            case "family":
                return not self.family_problems
            case "model":
                return not isinstance(self.hf_config, str) and not self.family_problems
            case "no problems":
                return not self.problems

    def concerns(self, check: Check) -> bool:
        """Return whether the check is one of the configuration's command."""
        return all(self.has(need) for need in check.needs if need in ("train", "dpo"))


Need = Literal["train", "dpo", "here", "cluster", "family", "model", "no problems"]
"""What a check needs: a configuration of this command, that the nodes are this one or given, that the family can be
imported, that config.json can be read too, or that nothing else is wrong."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of `CHECKS`."""

    find: Callable[[Subject], Iterable[str]]
    needs: tuple[Need, ...] = ()
    offline: bool = False
    """Whether the configuration is all that the check reads."""


def _model_problems(subject: Subject) -> Iterable[str]:
    assert not isinstance(subject.hf_config, str)
    gpus = find_local_gpu_types(subject.device) if subject.nodes is None else []
    return find_model_problems(subject.config, subject.hf_config, subject.device, gpus)


def _data_problems(subject: Subject) -> Iterable[str]:
    hf_config = None if isinstance(subject.hf_config, str) else subject.hf_config
    return find_data_problems(subject.config, hf_config, subject.reports)


CHECKS: Mapping[str, Check] = {
    "GPUs of this node": Check(lambda of: find_local_gpu_problems(of.config), ("here",)),
    "slots of the cluster": Check(
        lambda of: find_allocation_problems(of.config.placement, of.nodes or ()), ("cluster",), offline=True
    ),
    "packages": Check(lambda of: find_package_problems(of.config)),
    "batch sizes": Check(lambda of: find_batch_problems(of.config), offline=True),
    "folders": Check(lambda of: find_folder_problems(of.config)),
    "ranks of traces": Check(lambda of: find_profile_problems(of.config), offline=True),
    "outputs for metrics": Check(lambda of: find_sink_problems(of.config)),
    "optimizers": Check(lambda of: find_optimizer_problems(of.config)),
    "decays of learning rates": Check(lambda of: find_decay_problems(of.config)),
    "model family": Check(lambda of: of.family_problems),
    "slots of engines": Check(lambda of: find_engine_placement_problems(of.run), ("train",), offline=True),
    "environment variables": Check(lambda of: find_engine_variable_problems(), ("train",)),
    "engine": Check(lambda of: find_engine_problems(of.run), ("train",)),
    "rewards": Check(lambda of: find_reward_problems(of.run), ("train",)),
    "agent": Check(lambda of: find_agent_problems(of.run), ("train",)),
    "schedule": Check(lambda of: find_schedule_problems(of.run, of.device), ("train",), offline=True),
    "auxiliary models": Check(lambda of: find_auxiliary_model_problems(of.run), ("train", "family")),
    "ports": Check(lambda of: find_port_problems(of.run), ("train", "here")),
    "reference model": Check(lambda of: find_reference_problems(cast("DpoConfig", of.config)), ("dpo", "family")),
    "config.json": Check(lambda of: [of.hf_config] if isinstance(of.hf_config, str) else []),
    "model": Check(_model_problems, ("model",)),
    "delta sync": Check(lambda of: find_delta_problems(of.run, of.device), ("train", "model")),
    "stalls of the weight sync": Check(
        lambda of: find_stall_problems(of.run, of.device), ("train", "model", "no problems")
    ),
    "data": Check(_data_problems),
}
"""The checks of a configuration by what they check, in the order of their messages."""


def check_run(
    config: StageConfig, nodes: Sequence[ClusterNode] | None = None, reports: list[FileReport] | None = None
) -> list[str]:
    """Return all problems that can be found without starting a worker; empty if there are none.

    Args:
        nodes, reports: as in `check_or_raise`.
    """
    if will_write_model(config):
        return _check_with_tiny_model(config, nodes, reports)
    subject = Subject(config, nodes, reports)
    for check in CHECKS.values():
        if all(map(subject.has, check.needs)):
            subject.problems += check.find(subject)
    return list(dict.fromkeys(subject.problems))


def check_offline(config: StageConfig, nodes: Sequence[ClusterNode] | None = None) -> list[str]:
    """Check what can be checked without the model, the data, user code and the machine.

    Args:
        nodes: as in `check_or_raise`; None: the device is that of `placement.device`.

    Returns:
        names of the checks that were skipped

    Raises:
        ConfigError: all problems, one per line.
    """
    subject = Subject(config, nodes, reports=None)
    if nodes is None:
        subject.device = None if config.placement.device == "auto" else config.placement.device
    skipped = []
    for name, check in CHECKS.items():
        if check.offline and all(map(subject.has, check.needs)):
            subject.problems += check.find(subject)
        elif not check.offline and subject.concerns(check):
            skipped.append(name)
    if subject.problems:
        raise ConfigError("\n".join(dict.fromkeys(subject.problems)))
    return skipped


def optimizers_of(config: StageConfig) -> list[tuple[str, OptimizerConfig, int]]:
    """Return the YAML key, settings and number of updates of the optimizer of each trained model."""
    optimizers = [("trainer.optimizer", config.trainer.optimizer, config.policy_updates)]
    if isinstance(config, RunConfig):
        optimizers += [
            (f"{model.key}.optimizer", model.optimizer, config.auxiliary_updates)
            for model in config.auxiliary_models
            if model.optimizer is not None
        ]
    return optimizers


def find_warmup_notices(config: StageConfig) -> Iterator[str]:
    """Yield a sentence for each trained model whose learning rate never reaches its peak."""
    for key, optimizer, updates in optimizers_of(config):
        if optimizer.warmup_steps > updates:
            yield (
                f"{key}.warmup_steps: {optimizer.warmup_steps} optimizer steps are more than the run's {updates}, so "
                f"that the learning rate ends at {updates} / {optimizer.warmup_steps} of lr = {optimizer.lr:g}"
            )


def _check_with_tiny_model(
    config: StageConfig, nodes: Sequence[ClusterNode] | None, reports: list[FileReport] | None
) -> list[str]:
    """Check with the model that `model.tiny` describes, written to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        model = config.model.model_copy(update={"path": f"{folder}/model"})
        with_tiny_model = config.model_copy(update={"model": model})
        try:
            write_missing_model(with_tiny_model)
        except DataError as e:
            return [f"{next(iter(config.data.training_files))}: {e}"]
        return [
            problem.replace(model.path, config.model.path) for problem in check_run(with_tiny_model, nodes, reports)
        ]


OBSERVED_STEPS = 32
"""Number of the last run's last steps that the needed lookahead and cap are estimated from."""

MIN_OBSERVED_STEPS = 4
"""With fewer steps, nothing is estimated: the first ones contain the start of the engines."""


def find_journal_notices(config: RunConfig) -> Iterator[str]:
    """Yield what a run without checkpoints keeps of its rollouts."""
    if config.checkpoint.every:
        return
    if config.checkpoint.keep_journal == "needed":
        yield (
            "checkpoint.every: 0 writes no checkpoints: a run that is interrupted, or loses its trainer, starts over "
            "from step 0, and samples all steps again; with checkpoint.keep_journal: all it trains them on its journal"
        )
    else:
        yield (
            "checkpoint.every: 0 with checkpoint.keep_journal: all: nothing is ever removed from the journal, 8 bytes "
            "a token, and a run that is interrupted, or loses its trainer, trains again on all of it"
        )


def find_schedule_notices(config: RunConfig) -> Iterator[str]:
    """Yield what the last run in `run_dir` says about the lookahead and cap that a run needs, and unbounded weights."""
    decoupled = getattr(config.algorithm, "decoupled", None)
    if config.schedule.type != "sync" and decoupled is not None and decoupled.behave_cap is None:
        yield (
            "algorithm.decoupled.behave_cap: null does not bound the weights of samples of older policies, one of "
            "which may dominate a step; 2 is the bound of rollout_is"
        )
    tail = _read_tail(Path(config.run_dir) / METRICS_FILE)
    if tail is None:
        return
    yield f"the last run in {config.run_dir}: {tail.line}"
    if config.schedule.type != "sync":
        yield from tail.warnings(SchedulePolicy.of(config.schedule))


def _read_tail(file: Path) -> TailStats | None:
    """Return how long groups took in the last steps of a run; None if there are too few."""
    if not file.is_file():
        return None
    lines = file.read_text().split("\n")[:-1][-2 * OBSERVED_STEPS :]
    rows = [row for row in map(json.loads, lines) if "rollout/generation_seconds_mean" in row and "loss" in row]
    rows = [row for row in rows if row["step"] > 1][-OBSERVED_STEPS:]
    if len(rows) < MIN_OBSERVED_STEPS:
        return None
    generation = fmean(row["rollout/generation_seconds_mean"] for row in rows)
    training = fmean(map(_training_seconds, rows))
    return TailStats(
        mean_steps=generation / (step := _step_seconds(rows, generation, training)),
        max_steps=max(row["rollout/generation_seconds_max"] for row in rows) / step,
        train_steps=training / step,
    )


def _training_seconds(row: Mapping[str, float]) -> float:
    """Return the seconds of a step without those in which it waits for groups."""
    waiting = sum(row.get(f"time/{phase}_seconds", 0.0) for phase in ("rollout", "drain", "evaluate"))
    return row["time/step_seconds"] - waiting


def _step_seconds(rows: Sequence[Mapping[str, float]], generation: float, training: float) -> float:
    """Return the duration of an asynchronous step: as measured, or estimated from a synchronous run.

    Where the engines hold a whole batch at once, they are busy for the mean duration of its groups.
    """
    if "schedule/unfinished" in rows[-1]:
        return median(row["time/step_seconds"] for row in rows)
    return max(generation, training)
