"""Preflight checks of a run: find all problems of a configuration in one pass, before any worker starts.

Each problem is one line that starts with its YAML key and, if numbers conflict, shows the arithmetic.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.cluster.placement.assign import ClusterNode
from megarl.config.preference import DpoConfig
from megarl.config.reward import CodeRewardConfig, FormatRewardConfig, JudgeRewardConfig, PythonRewardConfig
from megarl.config.rollout import AgentConfig, EnvironmentConfig, HarnessConfig
from megarl.config.run import RunConfig, StageConfig
from megarl.config.trainer import OptimizerConfig, load_decay
from megarl.controller.preflight.code_reward_checks import find_test_case_problems
from megarl.controller.preflight.data_checks import find_batch_problems, find_data_problems
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
)
from megarl.controller.preflight.model_checks import (
    find_auxiliary_model_problems,
    find_family_problems,
    find_model_problems,
    find_reference_problems,
    will_write_model,
    write_missing_model,
)
from megarl.controller.preflight.schedule_checks import find_schedule_problems
from megarl.controller.preflight.weight_sync_checks import find_delta_problems, find_stall_problems
from megarl.data.tokenizer import load_tokenizer
from megarl.engines.custom_engine import check_engine
from megarl.errors import ConfigError, DataError
from megarl.megatron.families.load_architecture import (
    read_hf_config,
)
from megarl.model_files.json_object import JsonMapping
from megarl.reward.python_function import check_reward
from megarl.reward.services.judge_term import check_judge_pattern
from megarl.reward.terms import compile_pattern
from megarl.rollout.agents.agent import check_agent
from megarl.rollout.environments.conversation import require_chat_template
from megarl.rollout.environments.environment import check_environment
from megarl.rollout.gateway.harness_process import HARNESS, check_harness
from megarl.sandbox.tiers import choose_tier
from megarl.tracking.tracker import check_sink


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
    if not Path(config.model.path).is_dir():
        return  # reported with the model
    try:
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        refuses_forks = config.algorithm.refuses_forks
        require_chat_template(
            tokenizer, config.data.template_date, forks=section.forks, refuses_forks=refuses_forks, key=key
        )
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


def check_or_raise(config: StageConfig, nodes: Sequence[ClusterNode] | None = None) -> None:
    """Return if `check_run` finds no problems.

    Args:
        nodes: nodes that the run will have; None: this node, or those of the cluster at RAY_ADDRESS.

    Raises:
        ConfigError: all problems, one per line.
    """
    problems = check_run(config, nodes)
    if problems:
        raise ConfigError("\n".join(problems))


def check_run(config: StageConfig, nodes: Sequence[ClusterNode] | None = None) -> list[str]:
    """Return all problems that can be found without starting a worker; empty if there are none.

    Args:
        nodes: as in `check_or_raise`.
    """
    if will_write_model(config):
        return _check_with_tiny_model(config, nodes)
    problems = [
        *(find_local_gpu_problems(config) if nodes is None else find_allocation_problems(config.placement, nodes))
    ]
    problems += [*find_package_problems(config), *find_batch_problems(config), *find_folder_problems(config)]
    problems += [*find_profile_problems(config), *find_sink_problems(config), *find_decay_problems(config)]
    family_problems = [*find_family_problems(config)]
    has_family = not family_problems  # models cannot be read without theirs
    problems += family_problems
    if isinstance(config, RunConfig):
        problems += [
            *find_engine_placement_problems(config),
            *find_engine_variable_problems(),
            *find_engine_problems(config),
            *find_reward_problems(config),
            *find_agent_problems(config),
            *find_schedule_problems(config, find_device(config.placement, nodes)),
            *(find_auxiliary_model_problems(config) if has_family else ()),
        ]
        problems += find_port_problems(config) if nodes is None else ()
    if isinstance(config, DpoConfig) and has_family:
        problems += find_reference_problems(config)
    hf_config: JsonMapping | None = None
    try:
        hf_config = read_hf_config(Path(config.model.path))
    except DataError as e:
        problems.append(f"model.path: {e}")
    else:
        if has_family:
            device = find_device(config.placement, nodes)
            gpus = find_local_gpu_types(device) if nodes is None else []
            problems += find_model_problems(config, hf_config, device, gpus)
            if isinstance(config, RunConfig):
                problems += find_delta_problems(config, device)
            if isinstance(config, RunConfig) and not problems:
                problems += find_stall_problems(config, device)
    problems += find_data_problems(config, hf_config)
    return list(dict.fromkeys(problems))


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


def _check_with_tiny_model(config: StageConfig, nodes: Sequence[ClusterNode] | None) -> list[str]:
    """Check with the model that `model.tiny` describes, written to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        model = config.model.model_copy(update={"path": f"{folder}/model"})
        with_tiny_model = config.model_copy(update={"model": model})
        try:
            write_missing_model(with_tiny_model)
        except DataError as e:
            return [f"{next(iter(config.data.training_files))}: {e}"]
        return [problem.replace(model.path, config.model.path) for problem in check_run(with_tiny_model, nodes)]
