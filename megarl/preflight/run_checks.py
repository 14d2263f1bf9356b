"""Everything that can be found wrong with a run before a worker starts, in one pass.

Each problem is one sentence that opens with its YAML path and, where numbers clash, shows the arithmetic.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.placement import PlacementConfig, pool_key
from megarl.config.preference import DpoConfig, PreferenceConfig, RmConfig
from megarl.config.reward import FormatRewardConfig, NumericRewardConfig, PythonRewardConfig
from megarl.config.run import RunConfig, StageConfig
from megarl.data.prompt_budget import prompt_budget
from megarl.data.rows import read_rows
from megarl.errors import ConfigError, DataError
from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.layout_checks import parallel_problems, recompute_problems
from megarl.megatron.families.load_architecture import read_family
from megarl.megatron.families.model_folder import model_head, read_decoder, read_hf_config, weight_problems
from megarl.placement.assign import assign_nodes, resolve_device
from megarl.placement.hardware import visible_gpus
from megarl.placement.nodes import ClusterNode
from megarl.placement.rank_grid import RankGrid
from megarl.preflight.auxiliary_model_checks import role_problems
from megarl.preflight.tiny_model import will_write_model, write_missing_model
from megarl.process.torchrun_env import torchrun_world
from megarl.reward.python_function import load_reward_function
from megarl.rollout.engine_spec import PORTS_PER_REPLICA
from megarl.rollout.unsupported_options import engine_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.batch.trajectory import Prompt


def require_ready(config: StageConfig, nodes: Sequence[ClusterNode] | None = None) -> None:
    """Return if nothing would stop a run of `config`.

    Args:
        nodes: machines that the run will have; None: this one, or those of a cluster that it joins.

    Raises:
        ConfigError: every problem that `check_run` finds, one a line.
    """
    problems = check_run(config, nodes)
    if problems:
        raise ConfigError("\n".join(problems))


def check_run(config: StageConfig, nodes: Sequence[ClusterNode] | None = None) -> list[str]:
    """Every problem that can be found without starting a worker; empty where there is none.

    Args:
        nodes: see `require_ready`.
    """
    if will_write_model(config):
        return _check_with_tiny_model(config, nodes)
    problems = [*(_machine(config) if nodes is None else _allocation(config.placement, nodes))]
    problems += [*_packages(config), *_batches(config), *_folders(config)]
    if isinstance(config, RunConfig):
        problems += [*_engines(config), *_rewards(config), *role_problems(config)]
        problems += _ports(config) if nodes is None else ()
    if isinstance(config, DpoConfig):
        problems += _reference(config)
    limit: int | None = None
    try:
        hf_config = read_hf_config(Path(config.model.path))
    except DataError as e:
        problems.append(f"model.path: {e}")
    else:
        problems += _model(config, hf_config, _device(config.placement, nodes))
        try:
            limit = _token_limit(config, hf_config)
        except ConfigError as e:
            problems.append(str(e))
    problems += _data(config, limit)
    return list(dict.fromkeys(problems))


def _check_with_tiny_model(config: StageConfig, nodes: Sequence[ClusterNode] | None) -> list[str]:
    """The problems with the model that a run would write first; it is written to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        model = config.model.model_copy(update={"path": f"{folder}/model"})
        written = config.model_copy(update={"model": model})
        try:
            write_missing_model(written)
        except DataError as e:
            return [f"data.path: {e}"]
        return [problem.replace(model.path, config.model.path) for problem in check_run(written, nodes)]


def _machine(config: StageConfig) -> Iterator[str]:
    placement = config.placement
    # A cluster that is joined and torchrun's other machines have GPUs that this machine knows nothing of.
    if placement.device == "cuda" and "RAY_ADDRESS" not in os.environ and torchrun_world() is None:
        gpus = len(visible_gpus())
        if gpus < placement.all_slots:
            pools = f", with placement.pools {placement.all_slots}" if placement.pools else ""
            yield (
                f"placement.device: cuda needs nodes * slots_per_node = {placement.nodes} * "
                f"{placement.slots_per_node} = {placement.slots}{pools} GPUs, this machine has {gpus} (RAY_ADDRESS "
                "joins a cluster)"
            )


def _allocation(placement: PlacementConfig, nodes: Sequence[ClusterNode]) -> Iterator[str]:
    try:
        assign_nodes(placement.all_pools, nodes, resolve_device(placement, nodes))
    except ConfigError as e:
        yield str(e)


def _packages(config: StageConfig) -> Iterator[str]:
    # Not only find_spec: W&B's own output folder, wandb/, imports as an empty package.
    wandb = find_spec("wandb")
    if config.tracking.wandb is not None and (wandb is None or wandb.origin is None):
        yield "tracking.wandb: needs the package wandb, which is not installed"


def _batches(config: StageConfig) -> Iterator[str]:
    if not isinstance(config, RunConfig):
        if config.trainer.batch_size < config.dp:
            what = "pair" if isinstance(config, PreferenceConfig) else "demonstration"
            yield (
                f"trainer.batch_size: needs at least one {what} per data-parallel rank, got "
                f"{config.trainer.batch_size} < dp = {_dp(config)}"
            )
        return
    a = config.algorithm
    trajectories = a.prompts_per_step * a.group_size // a.mini_batches
    if trajectories < config.dp:
        yield (
            f"algorithm.prompts_per_step: a mini-batch needs at least one completion per data-parallel rank, got "
            f"prompts_per_step * group_size / mini_batches = {a.prompts_per_step} * {a.group_size} / "
            f"{a.mini_batches} = {trajectories} < dp = {_dp(config)}"
        )


def _dp(config: StageConfig) -> str:
    return f"slots / (tp * pp * cp) = {config.placement.slots} / {config.trainer.parallel.model_size} = {config.dp}"


def _folders(config: StageConfig) -> Iterator[str]:
    for key, folder in (("run_dir", config.run_dir), ("export_dir", config.export_path)):
        there = Path(folder)
        while not there.exists() and there != there.parent:
            there = there.parent
        if not there.is_dir():
            yield f"{key}: {folder} cannot be made, {there} is not a folder"
        elif not os.access(there, os.W_OK | os.X_OK):
            yield f"{key}: {folder} needs a folder that can be written, {there} cannot"


def _engines(config: RunConfig) -> Iterator[str]:
    """Engines that fit no node, or that the strategy would spread; a cluster may turn out to spread the slots else."""
    placement, tp, replicas, pool = config.placement, config.rollout.tp, config.rollout.replicas, config.rollout_pool
    per_node = pool.slots_per_node // tp
    if pool.nodes * per_node < replicas:
        of_pool = f" of {pool_key(placement.rollout.pool)}" if config.engines_apart else ""
        yield (
            f"rollout.replicas: engines need rollout.tp = {tp} slots of one node each, got replicas = {replicas} > "
            f"nodes * (slots_per_node // tp){of_pool} = {pool.nodes} * ({pool.slots_per_node} // {tp}) = "
            f"{pool.nodes * per_node}"
        )
    if config.weight_sync.strategy != "micro_dp":
        return
    from megarl.reshard.layout.engine_ranks import (
        require_one_machine,  # imports torch, which most checks do without
        strided_servers,
    )
    from megarl.reshard.layout.topology import Topology

    grid = RankGrid.of(config.trainer.parallel, placement.slots)
    topology = Topology(tuple(rank // placement.slots_per_node for rank in range(placement.slots)))
    try:
        servers = strided_servers(grid, gen_tp=tp)[:replicas]
    except ConfigError as e:
        yield f"weight_sync.strategy: {e}"
        return
    try:
        require_one_machine("micro_dp", servers, topology)
    except ConfigError as e:
        yield str(e)


def _ports(config: RunConfig) -> Iterator[str]:
    base = config.rollout.engine.base_port
    # On several nodes, which one runs a replica is not known here.
    if base is None or config.rollout_pool.nodes > 1 or "RAY_ADDRESS" in os.environ:
        return
    for replica in range(config.rollout.replicas):
        port = base + PORTS_PER_REPLICA * replica
        sum_ = f"{base} + {PORTS_PER_REPLICA} * {replica} = {port}"
        if port > 65535:
            yield f"rollout.engine.base_port: replica {replica} needs a port up to 65535, got {sum_}"
        elif _in_use(port):
            yield f"rollout.engine.base_port: replica {replica} needs a free port, {sum_} is in use"


def _in_use(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _rewards(config: RunConfig) -> Iterator[str]:
    for name, term in config.reward.terms.items():
        key = f"reward.terms.{name}"
        match term:
            case FormatRewardConfig(pattern=pattern):
                try:
                    re.compile(pattern)
                except re.error as e:
                    yield f"{key}.pattern: needs a regular expression, got {pattern!r}: {e}"
            case PythonRewardConfig(path=path):
                try:
                    load_reward_function(path, key=f"{key}.path")
                except ConfigError as e:
                    yield str(e)


def _model(config: StageConfig, hf_config: dict[str, Any], device: str | None) -> Iterator[str]:
    folder = Path(config.model.path)
    try:
        model = read_family(hf_config, origin=str(folder / "config.json"), head=model_head(config))
    except ConfigError as e:
        yield f"model.path: {e}"
        return
    yield from (f"model.path: {problem}" for problem in weight_problems(folder, model))
    yield from parallel_problems(model, config.trainer.parallel, config.placement.slots)
    yield from recompute_problems(model, config.trainer.parallel, config.trainer.recompute)
    if isinstance(config, RunConfig):
        yield from _engine_divides(model, config.rollout.tp)
        if device is not None:
            yield from engine_problems(hf_config, device, origin=str(folder / "config.json"))


def _reference(config: DpoConfig) -> Iterator[str]:
    """Of the model that rewards measure from, where it is another than the one that is trained."""
    reference, key = config.dpo.reference, "dpo.reference.path"
    if reference.path is None:
        return
    try:
        model = read_decoder(Path(reference.path))
        vocab_size = read_decoder(Path(config.model.path)).vocab_size if Path(config.model.path).exists() else None
    except (ConfigError, DataError) as e:
        yield f"{key}: {e}"
        return
    yield from (f"{key}: {problem}" for problem in weight_problems(Path(reference.path), model))
    parallel = reference.parallel or config.trainer.parallel
    for problem in parallel_problems(model, parallel, config.placement.slots):
        yield problem.replace("trainer.parallel", "dpo.reference.parallel")
    if vocab_size is not None and model.vocab_size != vocab_size:
        yield f"{key}: needs the vocabulary of model.path, got {model.vocab_size} tokens, model.path has {vocab_size}"


def _engine_divides(model: Decoder, tp: int) -> Iterator[str]:
    for units in model.units():
        # SGLang repeats key-value heads where ranks outnumber them, and splits experts over the same ranks
        repeated = units.repeats and tp % units.total == 0
        if units.axis != "ep" and units.total % tp and not repeated:
            yield f"rollout.tp: {units.what} that do not divide, {units.total} % {tp} = {units.total % tp}"


def _device(placement: PlacementConfig, nodes: Sequence[ClusterNode] | None) -> str | None:
    """Where workers will run; None where only the cluster that is joined knows: engines then look again."""
    if placement.device != "auto":
        return placement.device
    if nodes is not None:
        return resolve_device(placement, nodes)
    if "RAY_ADDRESS" in os.environ:
        return None
    return "cuda" if len(visible_gpus()) >= placement.all_slots else "cpu"


def _token_limit(config: StageConfig, hf_config: Mapping[str, Any]) -> int:
    """Longest prompt; without engines, longest demonstration or answer with its prompt."""
    return prompt_budget(config, hf_config) if isinstance(config, RunConfig) else hf_config["max_position_embeddings"]


def _data(config: StageConfig, limit: int | None) -> list[str]:
    """Problems of the tokenizer and of the data files; rows are at least read where they cannot be tokenized."""
    from megarl.data.tokenizer import load_tokenizer  # imports torch, which the checks above do without

    problems: list[str] = []
    tokenizer: PreTrainedTokenizerBase | None = None
    if Path(config.model.path).is_dir():
        try:
            tokenizer = load_tokenizer(config.model.path)
        except DataError as e:
            problems.append(f"model.path: {e}")
    for key, path in (("data.path", config.data.path), ("data.eval_path", config.data.eval_path)):
        if path is None:
            continue
        try:
            _read_data(config, path, tokenizer, limit)
        except (DataError, ConfigError) as e:
            # Problems of the whole section open with their own key.
            problems.append(str(e) if str(e).startswith("data.") else f"{key}: {e}")
    return problems


def _read_data(config: StageConfig, path: str, tokenizer: PreTrainedTokenizerBase | None, limit: int | None) -> None:
    from megarl.data.demonstrations import load_demonstrations
    from megarl.data.preference_pairs import load_preferences
    from megarl.data.prompts import load_prompts

    if tokenizer is not None and limit is not None:
        if isinstance(config, RunConfig):
            prompts = load_prompts(config.data, tokenizer, path=path, max_prompt_tokens=limit)
            _require_answers(config, prompts)
            return
        if isinstance(config, PreferenceConfig):
            safety = isinstance(config, RmConfig) and config.rm.kind == "cost"
            load_preferences(config.data, tokenizer, path=path, max_tokens=limit, safety=safety)
            return
        if path == config.data.path:
            load_demonstrations(config.data, tokenizer, path=path, max_tokens=limit)
            return
    for _ in read_rows(path):
        pass


def _require_answers(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    numeric = [name for name, term in config.reward.terms.items() if isinstance(term, NumericRewardConfig)]
    without = [prompt.prompt_id for prompt in prompts if prompt.answer is None]
    if numeric and without:
        raise DataError(
            f"reward.terms.{numeric[0]} (numeric) needs field {config.data.fields.answer!r} (data.fields.answer), "
            f"{len(without)} of {len(prompts)} rows have none, first {without[0]}"
        )
