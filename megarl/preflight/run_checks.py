"""Preflight checks of a run: find all problems of a configuration in one pass, before any worker starts.

Each problem is one line that starts with its YAML key and, if numbers conflict, shows the arithmetic.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.config.preference import DpoConfig
from megarl.config.run import RunConfig, StageConfig
from megarl.errors import ConfigError, DataError
from megarl.megatron.families.model_folder import (
    read_hf_config,
)
from megarl.model_files.json_object import JsonMapping
from megarl.placement.nodes import ClusterNode
from megarl.preflight.agent_checks import find_agent_problems
from megarl.preflight.auxiliary_model_checks import find_auxiliary_model_problems
from megarl.preflight.data_checks import find_batch_problems, find_data_problems
from megarl.preflight.machine_checks import (
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
from megarl.preflight.model_checks import (
    find_family_problems,
    find_model_problems,
    find_reference_problems,
)
from megarl.preflight.reward_checks import find_reward_problems
from megarl.preflight.schedule_checks import find_schedule_problems
from megarl.preflight.tiny_model import will_write_model, write_missing_model
from megarl.preflight.weight_sync_checks import find_delta_problems, find_stall_problems


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
    problems += find_profile_problems(config)
    family_problems = [*find_family_problems(config)]
    has_family = not family_problems  # models cannot be read without theirs
    problems += family_problems
    if isinstance(config, RunConfig):
        problems += [
            *find_engine_placement_problems(config),
            *find_engine_variable_problems(),
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


def find_warmup_notices(config: StageConfig) -> Iterator[str]:
    """Yield a sentence for each trained model whose learning rate never reaches its peak."""
    optimizers = [("trainer.optimizer", config.trainer.optimizer, config.policy_updates)]
    if isinstance(config, RunConfig):
        optimizers += [
            (f"{model.key}.optimizer", model.optimizer, config.auxiliary_updates)
            for model in config.auxiliary_models
            if model.optimizer is not None
        ]
    for key, optimizer, updates in optimizers:
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
