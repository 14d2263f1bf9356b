"""The auxiliary models of a run (critics, reference, reward models, teachers) and their placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megarl.cluster.placement.pool import SlotPool
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.group import WorkerFuture, WorkerGroup, WorkerProcesses
from megarl.config import RunConfig
from megarl.config.model import REWARD_MODEL_NAME, AuxiliaryModel
from megarl.config.placement import MAIN_POOL
from megarl.config.trainer import OffloadConfig
from megarl.megatron.families.architecture import sequence_cost
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.requests import ModelSpec, TrainerSpec
from megarl.megatron.trainer_worker import FrozenWorker, TrainerWorker
from megarl.run.remote.trainer_group import FrozenGroup, TrainerGroup, make_rank_processes


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryModels:
    """The auxiliary models of a run, by name."""

    trained: Mapping[str, TrainerGroup]
    frozen: Mapping[str, FrozenGroup]
    dedicated: frozenset[str]
    """Names of the models with dedicated slots."""
    processes: tuple[WorkerProcesses, ...] = ()
    """Processes of the trainer and of all dedicated pools."""

    @classmethod
    def start(
        cls, config: RunConfig, processes: WorkerProcesses, pools: Mapping[str, SlotPool], *, load_weights: bool = True
    ) -> tuple[AuxiliaryModels, list[WorkerFuture[None]]]:
        """Begin to build all models; return them and the pending calls to wait for.

        Args:
            processes: the trainer's processes, which models without dedicated slots share.
            pools: slots by the name of their pool.
            load_weights: whether trained models load the weights of their folders; if not, a checkpoint is loaded
                later.
        """
        processes_by_pool = {MAIN_POOL: processes}
        trained, frozen, dedicated, starting = {}, {}, set(), []
        for auxiliary in config.auxiliary_models:
            if auxiliary.pool not in processes_by_pool:
                processes_by_pool[auxiliary.pool] = make_rank_processes(pools[auxiliary.pool], auxiliary.pool)
            if auxiliary.pool != MAIN_POOL:
                dedicated.add(auxiliary.name)
            processes = processes_by_pool[auxiliary.pool]
            grid = RankGrid.of(auxiliary.parallel, len(processes.pool.slots))
            spec = auxiliary_spec(config, auxiliary, processes.pool.device)
            cost = sequence_cost(load_architecture_and_dtype(auxiliary.path, family=config.model.family)[0])
            if auxiliary.optimizer is None:
                model = FrozenGroup(WorkerGroup[FrozenWorker](auxiliary.name, processes, grid), cost=cost)
                starting.append(model.start_workers(spec))
                frozen[auxiliary.name] = model
            else:
                trainer = TrainerGroup(
                    WorkerGroup[TrainerWorker](auxiliary.name, processes, grid),
                    cost=cost,
                    offload_config=OffloadConfig(),
                )
                spec = replace(spec, weights="hf" if load_weights else "none")
                starting.append(
                    trainer.start_workers(
                        TrainerSpec(model=spec, optimizer=auxiliary.optimizer, optimizer_steps=config.auxiliary_updates)
                    )
                )
                trained[auxiliary.name] = trainer
        models = cls(
            trained=trained, frozen=frozen, dedicated=frozenset(dedicated), processes=tuple(processes_by_pool.values())
        )
        return models, starting

    @property
    def scorers(self) -> Mapping[str, FrozenGroup]:
        """Reward models by the name of their reward term."""
        prefix = REWARD_MODEL_NAME.format("")
        return {name.removeprefix(prefix): group for name, group in self.frozen.items() if name.startswith(prefix)}


def auxiliary_spec(config: RunConfig, auxiliary: AuxiliaryModel, device: str) -> ModelSpec:
    """Return what a frozen worker of the model is built from."""
    swap = (device == "cuda") if config.placement.offload_idle_models is None else config.placement.offload_idle_models
    return ModelSpec(
        model_path=auxiliary.path,
        family=config.model.family,
        head=auxiliary.head,
        dtype=config.model.dtype,
        fused_lm_head=config.trainer.fused_lm_head,
        fp32_lm_head=config.model.fp32_lm_head,
        parallel=auxiliary.parallel,
        recompute=config.trainer.recompute,
        megatron=config.trainer.megatron,
        moe=config.trainer.moe.model_copy(update={"router_replay": "none"}),
        timeout_seconds=config.trainer.timeout_seconds,
        temperature=config.rollout.sampling.temperature if auxiliary.head == "lm" else 1.0,
        seed=config.seed,
        offload_when_idle=swap and auxiliary.pool == MAIN_POOL,
    )
