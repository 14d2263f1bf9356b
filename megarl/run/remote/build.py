"""Builds trainer groups, engines and rollout workers from the configuration; slow parts start concurrently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from contextlib import closing as close_after
from dataclasses import replace
from pathlib import Path

from megarl.batch.trajectory import Prompt
from megarl.checkpoint.run_lock import find_claim
from megarl.cluster.placement.pool import SlotPool, reserve, reserve_pools
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.group import Group, Processes, WorkerProcesses
from megarl.config import DpoConfig, RunConfig, StageConfig
from megarl.data.sampler import RunPrompts, load_held_out, load_run_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.megatron.families.architecture import sequence_cost
from megarl.megatron.families.load_architecture import load_architecture_from_folder, model_head, read_hf_config
from megarl.megatron.requests import ModelSpec, TrainerSpec
from megarl.megatron.trainer_worker import FrozenWorker
from megarl.reward.test_cases import GradableRows
from megarl.run.remote.engine_group import EngineGroup, place_dedicated_engines, place_engines
from megarl.run.remote.rollout_group import RolloutGroup
from megarl.run.remote.trainer_group import FrozenGroup, TrainerGroup, make_rank_processes, make_trainer_group
from megarl.run.supervision.restart_budget import RestartBudget


def trainer_spec(config: StageConfig, *, load_weights: bool = True) -> TrainerSpec:
    """Return the spec of this stage's trainer ranks; `load_weights`: start from the weights of the model folder."""
    temperature = config.rollout.sampling.temperature if isinstance(config, RunConfig) else 1.0
    model = ModelSpec(
        model_path=config.model.path,
        family=config.model.family,
        dtype=config.model.dtype,
        fused_lm_head=config.trainer.fused_lm_head,
        fp32_lm_head=config.model.fp32_lm_head,
        parallel=config.trainer.parallel,
        recompute=config.trainer.recompute,
        megatron=config.trainer.megatron,
        moe=config.trainer.moe,
        timeout_seconds=config.trainer.timeout_seconds,
        weights="hf" if load_weights else "none",
        head=model_head(config),
        temperature=temperature,
        seed=config.seed,
    )
    return TrainerSpec(
        model=model,
        optimizer=config.trainer.optimizer,
        optimizer_steps=config.policy_updates,
        claim=find_claim(config.run_dir),
    )


def build_trainer(config: StageConfig, processes: Processes, *, load_weights: bool = True) -> TrainerGroup:
    """Build the trainer ranks and wait for them; `load_weights`: as for `trainer_spec`."""
    group = make_trainer_group(config, processes)
    group.start_workers(trainer_spec(config, load_weights=load_weights)).result(config.placement.start_timeout_seconds)
    return group


def stage_processes(config: StageConfig) -> WorkerProcesses:
    """Reserve the stage's slots and create a trainer process on each."""
    return make_rank_processes(reserve(config.placement), "trainer")


def build_dpo(config: DpoConfig, processes: Processes) -> tuple[TrainerGroup, FrozenGroup | None]:
    """Build the trainer and, in the same processes, the reference model if the configuration names one."""
    trainer, reference = make_trainer_group(config, processes), None
    starting = [trainer.start_workers(trainer_spec(config))]
    if config.dpo.reference.path is not None:
        reference = reference_group(config, processes.group("reference", reference_grid(config)))
        starting.append(reference.start_workers(reference_spec(config, processes.device)))
    for pending in starting:
        pending.result(config.placement.start_timeout_seconds)
    return trainer, reference


def reference_spec(config: DpoConfig, device: str) -> ModelSpec:
    """Return the spec of a separate reference model, which is used once and may be offloaded afterwards."""
    assert config.dpo.reference.path is not None
    return replace(
        trainer_spec(config).model,
        model_path=config.dpo.reference.path,
        parallel=config.dpo.reference.parallel or config.trainer.parallel,
        offload_when_idle=device == "cuda"
        if config.placement.offload_idle_models is None
        else config.placement.offload_idle_models,
    )


def reference_grid(config: DpoConfig) -> RankGrid:
    """Return the parallel layout of the reference model."""
    return RankGrid.of(config.dpo.reference.parallel or config.trainer.parallel, config.placement.slots)


def reference_group(config: DpoConfig, group: Group[FrozenWorker]) -> FrozenGroup:
    """Return the reference model on the ranks of `group`."""
    assert config.dpo.reference.path is not None
    model = load_architecture_from_folder(Path(config.dpo.reference.path), family=config.model.family)
    return FrozenGroup(group, cost=sequence_cost(model))


def start_engines(
    config: RunConfig, pools: Mapping[str, SlotPool], grid: RankGrid, restart_budget: RestartBudget | None = None
) -> EngineGroup:
    """Begin to start the engines, colocated with a trainer of that grid or on dedicated slots; returns at once.

    Args:
        restart_budget: the run's budget, if it has one.
    """
    pool = pools[config.placement.rollout.pool]
    engine_slots = place_dedicated_engines(config, pool) if config.disaggregated else place_engines(config, pool, grid)
    # until the trainer has been built and offloaded
    waits = shares_gpus(config, pool.device) or config.releases_engine_memory(pool.device)
    return EngineGroup(config, pool, engine_slots, restart_budget, waits_for_memory=waits)


def shares_gpus(config: RunConfig, device: str) -> bool:
    """Return whether the engines run on the GPUs of the trainer; `device`: `cpu` or `cuda`."""
    return device == "cuda" and not config.disaggregated


def build_evaluation(config: RunConfig, closing: ExitStack) -> tuple[RolloutGroup, Sequence[Prompt]]:
    """Start engines with the weights of the model folder; return rollout workers and the held-out prompts.

    Args:
        closing: receives the callbacks that shut the engines and rollout workers down.
    """
    (pool,) = reserve_pools(config.placement, {config.placement.rollout.pool: config.rollout_pool}).values()
    engines = EngineGroup(config, pool, place_dedicated_engines(config, pool))
    closing.callback(engines.shutdown)
    rollout = RolloutGroup(config, engines)
    closing.callback(rollout.shutdown)
    hf_config = read_hf_config(Path(config.model.path))
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    with close_after(GradableRows(config)) as rows:
        held_out = load_held_out(config, tokenizer, hf_config, None, rows.of_source)
    engines.wait_started()
    rollout.start()
    return rollout, held_out


def read_prompts(config: RunConfig, folder: Path | None) -> RunPrompts:
    """Load the prompts of a run; `folder`: as for `load_run_prompts`."""
    hf_config = read_hf_config(Path(config.model.path))
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    with close_after(GradableRows(config)) as rows:
        return load_run_prompts(config, tokenizer, hf_config, folder, rows.of_source)
