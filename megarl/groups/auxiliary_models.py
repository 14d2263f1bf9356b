"""The models that a run has beside its policy, and where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megarl.config import RunConfig
from megarl.config.algorithms.algorithm import VapoConfig
from megarl.config.auxiliary_roles import SCORER, Role
from megarl.config.placement import MAIN_POOL
from megarl.config.trainer import OffloadConfig
from megarl.groups.trainer_group import FrozenGroup, TrainerGroup, rank_processes
from megarl.megatron.families.cost import sequence_cost
from megarl.megatron.families.load_architecture import read_model
from megarl.megatron.requests import ModelSpec, TrainerSpec
from megarl.megatron.trainer_worker import FrozenWorker, TrainerWorker
from megarl.placement.pool import SlotPool
from megarl.placement.rank_grid import RankGrid
from megarl.workers.group import Pending, WorkerGroup, WorkerProcesses


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """A run's models beside the policy, by the names of their roles."""

    trained: Mapping[str, TrainerGroup]
    frozen: Mapping[str, FrozenGroup]
    apart: frozenset[str]
    """Names of those with slots of their own."""
    processes: tuple[WorkerProcesses, ...] = ()
    """The trainer's, and those of all pools that models have to themselves."""

    @classmethod
    def start(
        cls, config: RunConfig, processes: WorkerProcesses, pools: Mapping[str, SlotPool], *, fill: bool = True
    ) -> tuple[Models, list[Pending[None]]]:
        """All of them, and what to wait for until they are built.

        Args:
            processes: the trainer's, which models share that have no slots of their own.
            pools: slots by the name of their pool.
            fill: models that are trained start from their folders; else something will load them.
        """
        of_pool = {MAIN_POOL: processes}
        trained, frozen, apart, starting = {}, {}, set(), []
        for role in config.roles:
            if role.pool not in of_pool:
                of_pool[role.pool] = rank_processes(pools[role.pool], role.pool)
            if role.pool != MAIN_POOL:
                apart.add(role.name)
            processes = of_pool[role.pool]
            grid = RankGrid.of(role.parallel, len(processes.pool.slots))
            spec = _model_spec(config, role, processes.pool.device)
            cost = sequence_cost(read_model(role.path)[0])
            if role.optimizer is None:
                model = FrozenGroup(WorkerGroup[FrozenWorker](role.name, processes, grid), cost=cost)
                starting.append(model.start_workers(spec))
                frozen[role.name] = model
            else:
                trainer = TrainerGroup(
                    WorkerGroup[TrainerWorker](role.name, processes, grid), cost=cost, offloaded=OffloadConfig()
                )
                updates = total_updates(config) + pretraining_updates(config)
                spec = replace(spec, weights="hf" if fill else "none")
                starting.append(
                    trainer.start_workers(TrainerSpec(model=spec, optimizer=role.optimizer, optimizer_steps=updates))
                )
                trained[role.name] = trainer
        models = cls(trained=trained, frozen=frozen, apart=frozenset(apart), processes=tuple(of_pool.values()))
        return models, starting

    @property
    def scorers(self) -> Mapping[str, FrozenGroup]:
        """Reward models by the name of their term."""
        prefix = SCORER.format("")
        return {name.removeprefix(prefix): group for name, group in self.frozen.items() if name.startswith(prefix)}


def total_updates(config: RunConfig) -> int:
    """Optimizer steps of the whole run."""
    return config.trainer.steps * config.algorithm.updates_per_step


def pretraining_updates(config: RunConfig) -> int:
    """Optimizer steps of critics before the policy's first."""
    algorithm = config.algorithm
    return algorithm.pretraining.max_steps * algorithm.updates_per_step if isinstance(algorithm, VapoConfig) else 0


def _model_spec(config: RunConfig, role: Role, device: str) -> ModelSpec:
    swap = (device == "cuda") if config.placement.swap_idle is None else config.placement.swap_idle
    return ModelSpec(
        model_path=role.path,
        head=role.head,
        dtype=config.model.dtype,
        parallel=role.parallel,
        recompute=config.trainer.recompute,
        temperature=config.rollout.sampling.temperature if role.head == "lm" else 1.0,
        seed=config.seed,
        swaps=swap and role.pool == MAIN_POOL,
    )
