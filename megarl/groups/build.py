"""Hands each component its own part of the configuration, and starts the slow ones side by side."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from megarl.batch.trajectory import Prompt
from megarl.config import DpoConfig, RunConfig, StageConfig
from megarl.data.prompt_budget import prompt_budget
from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.groups.auxiliary_models import total_updates
from megarl.groups.engine_group import EngineGroup
from megarl.groups.engine_placement import choose_servers, own_servers
from megarl.groups.rollout_group import RolloutGroup
from megarl.groups.trainer_group import FrozenGroup, TrainerGroup, rank_processes, trainer_on
from megarl.megatron.families.cost import sequence_cost
from megarl.megatron.families.model_folder import model_head, read_decoder, read_hf_config
from megarl.megatron.requests import ModelSpec, TrainerSpec
from megarl.megatron.trainer_worker import FrozenWorker
from megarl.placement.pool import SlotPool, reserve, reserve_pools
from megarl.placement.rank_grid import RankGrid
from megarl.supervision.restart_budget import Restarts
from megarl.workers.group import Group, Processes, WorkerProcesses


def trainer_spec(config: StageConfig, *, fill: bool = True) -> TrainerSpec:
    """What trainer ranks of this stage are built from; `fill`: with the weights of the model's folder."""
    steps, temperature = config.trainer.steps, 1.0
    if isinstance(config, RunConfig):
        steps, temperature = total_updates(config), config.rollout.sampling.temperature
    model = ModelSpec(
        model_path=config.model.path,
        dtype=config.model.dtype,
        parallel=config.trainer.parallel,
        recompute=config.trainer.recompute,
        weights="hf" if fill else "none",
        head=model_head(config),
        temperature=temperature,
        seed=config.seed,
    )
    return TrainerSpec(model=model, optimizer=config.trainer.optimizer, optimizer_steps=steps)


def build_trainer(config: StageConfig, processes: Processes, *, fill: bool = True) -> TrainerGroup:
    """Trainer ranks alone; `fill`: see `trainer_spec`."""
    group = trainer_on(config, processes)
    group.start_workers(trainer_spec(config, fill=fill)).result(config.placement.start_timeout_seconds)
    return group


def stage_processes(config: StageConfig) -> WorkerProcesses:
    """A process for a trainer rank on every slot."""
    return rank_processes(reserve(config.placement), "trainer")


def build_dpo(config: DpoConfig, processes: Processes) -> tuple[TrainerGroup, FrozenGroup | None]:
    """Trainer ranks, and in the same processes the model that rewards measure from, where it is another."""
    trainer, reference = trainer_on(config, processes), None
    starting = [trainer.start_workers(trainer_spec(config))]
    if config.dpo.reference.path is not None:
        reference = reference_group(config, processes.group("reference", reference_grid(config)))
        starting.append(reference.start_workers(reference_spec(config, processes.device)))
    for each in starting:
        each.result(config.placement.start_timeout_seconds)
    return trainer, reference


def reference_spec(config: DpoConfig, device: str) -> ModelSpec:
    """What the ranks of a reference model of its own are built from, which is asked once, and then out of the way."""
    assert config.dpo.reference.path is not None
    return replace(
        trainer_spec(config).model,
        model_path=config.dpo.reference.path,
        parallel=config.dpo.reference.parallel or config.trainer.parallel,
        swaps=device == "cuda" if config.placement.swap_idle is None else config.placement.swap_idle,
    )


def reference_grid(config: DpoConfig) -> RankGrid:
    """Which of its ranks does what."""
    return RankGrid.of(config.dpo.reference.parallel or config.trainer.parallel, config.placement.slots)


def reference_group(config: DpoConfig, group: Group[FrozenWorker]) -> FrozenGroup:
    """It, as `group` of ranks."""
    assert config.dpo.reference.path is not None
    return FrozenGroup(group, cost=sequence_cost(read_decoder(Path(config.dpo.reference.path))))


def start_engines(
    config: RunConfig, pools: Mapping[str, SlotPool], grid: RankGrid, restarts: Restarts | None = None
) -> EngineGroup:
    """Engines beside the ranks of a trainer of that grid, or on slots of their own; they are not up yet.

    Args:
        restarts: the run's budget, where it has one.
    """
    pool = pools[config.placement.rollout.pool]
    servers = own_servers(config, pool) if config.engines_apart else choose_servers(config, pool, grid)
    return EngineGroup(config, pool, servers, restarts)


def build_evaluation(config: RunConfig, closing: ExitStack) -> tuple[RolloutGroup, list[Prompt]]:
    """Engines that serve the model folder as it is, and the held-out prompts; `closing` as in `build_policy_run`."""
    (pool,) = reserve_pools(config.placement, {config.placement.rollout.pool: config.rollout_pool}).values()
    engines = EngineGroup(config, pool, own_servers(config, pool))
    closing.callback(engines.shutdown)
    rollout = RolloutGroup(config, engines)
    _, held_out = read_prompts(config)
    engines.wait_started()
    rollout.start()
    return rollout, held_out


def read_prompts(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts."""
    tokenizer = load_tokenizer(config.model.path)
    budget = prompt_budget(config, read_hf_config(Path(config.model.path)))
    prompts = load_prompts(config.data, tokenizer, path=config.data.path, max_prompt_tokens=budget)
    if config.data.eval_path is None:
        return prompts, []
    held_out = load_prompts(config.data, tokenizer, path=config.data.eval_path, max_prompt_tokens=budget)
    return prompts, held_out[: config.data.eval_size]
