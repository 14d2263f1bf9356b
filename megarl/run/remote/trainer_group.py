"""The controller's handles on groups of Megatron ranks: trainers, frozen models, and the auxiliary models of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from megarl.batch.balance import SequenceCost
from megarl.batch.pack import SampleKey
from megarl.cluster.placement.hardware import BLACKWELL, find_gpu_type
from megarl.cluster.placement.pool import SlotPool
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.dispatch import BROADCAST, Dispatch, Payload, from_output_rank, to_all
from megarl.cluster.workers.group import Group, Processes, WorkerFuture, WorkerGroup, WorkerProcesses
from megarl.config import RunConfig, StageConfig
from megarl.config.model import REWARD_MODEL_NAME, AuxiliaryModel
from megarl.config.placement import MAIN_POOL
from megarl.config.trainer import OffloadConfig
from megarl.megatron.families.architecture import sequence_cost
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.request_samples import computed_column, forward_dispatch, train_dispatch
from megarl.megatron.requests import (
    PREPARE,
    PUSH,
    ForwardRequest,
    LoadReport,
    ModelSpec,
    PreparedSync,
    PushRequest,
    PushResult,
    SavedShard,
    SaveRequest,
    SaveStats,
    SyncSetup,
    TokenColumn,
    TrainerSpec,
    TrainRequest,
    TrainStats,
)
from megarl.megatron.trainer_worker import ForwardWorker, FrozenWorker, TrainerWorker

if TYPE_CHECKING:
    from megarl.megatron.runtime.offload import OffloadStats
    from megarl.reshard.transfer.process_groups import TransferGroup
    from megarl.reshard.transfer.weight_sums import PartSums


MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable with the number of hardware queues that kernels of a process are put in."""


class ModelGroup[W: ForwardWorker]:
    """A model on the ranks of a group, which can run forward passes (`ForwardWorker`)."""

    def __init__(self, group: Group[W], *, cost: SequenceCost) -> None:
        """`cost`: cost model by which micro-batches are balanced."""
        self.group, self._cost = group, cost
        self._forward_dispatch = forward_dispatch(cost)

    @property
    def grid(self) -> RankGrid:
        """Parallel layout of the ranks."""
        return self.group.grid

    def logprobs(self, request: ForwardRequest) -> Payload[TokenColumn]:
        """Return the log-probability of each token; the values stay with the ranks."""
        results = self.group.call_remote(ForwardWorker.logprobs, request, dispatch=self._forward_dispatch)
        return computed_column(request, results, self.grid, cost=self._cost)

    def take_routes(self, request: ForwardRequest) -> Payload[TokenColumn]:
        """Return the routes that `logprobs` has recorded for this request; they stay with the ranks."""
        results = self.group.call_remote(ForwardWorker.take_routes, None, dispatch=BROADCAST)
        return computed_column(request, results, self.grid, cost=self._cost)

    def values(self, request: ForwardRequest) -> Payload[TokenColumn]:
        """Return the value before each token, of a value model; the values stay with the ranks."""
        results = self.group.call_remote(ForwardWorker.values, request, dispatch=self._forward_dispatch)
        return computed_column(request, results, self.grid, cost=self._cost)

    def scores(self, request: ForwardRequest) -> Mapping[SampleKey, float]:
        """Return one score per trajectory, of a value model."""
        return self.group.call(ForwardWorker.scores, request, dispatch=self._forward_dispatch)


class FrozenGroup(ModelGroup[FrozenWorker]):
    """A model that is not trained."""

    def start_workers(self, spec: ModelSpec) -> WorkerFuture[None]:
        """Build the model on every rank."""
        return self.group.start(FrozenWorker, (spec,))


class TrainerGroup(ModelGroup[TrainerWorker]):
    """A model that is trained."""

    def __init__(self, group: Group[TrainerWorker], *, cost: SequenceCost, offload_config: OffloadConfig) -> None:
        """`offload_config`: as `OffloadConfig.resolved` returns it."""
        super().__init__(group, cost=cost)
        self._train_dispatch = replace(train_dispatch(cost), collect=self._collect_stats)
        self._is_save_written: bool | None = None
        """Whether no rank was writing files of a save at the end of the last training step; None: not known."""
        self.offload_config = offload_config
        """Which tensors `offload` moves to host memory."""

    def start_workers(self, spec: TrainerSpec) -> WorkerFuture[None]:
        """Build model and optimizer on every rank."""
        return self.group.start(TrainerWorker, (spec,))

    def train_step(self, request: TrainRequest) -> TrainStats:
        """Run the optimizer steps of the request, split over the data-parallel replicas."""
        return self.group.call(TrainerWorker.train_step, request, dispatch=self._train_dispatch)

    def begin_train_step(self, request: TrainRequest) -> WorkerFuture[TrainStats]:
        """Begin `train_step`; return at once if the ranks are other processes. Steps run in the order of the calls."""
        return self.group.begin(TrainerWorker.train_step, request, dispatch=self._train_dispatch)

    def _collect_stats(self, results: Sequence[TrainStats], grid: RankGrid) -> TrainStats:
        self._is_save_written = all(stats.is_save_written for stats in results)
        return from_output_rank(results, grid)

    def prepare_sync(self, setup: SyncSetup) -> PreparedSync:
        """Plan the next pushes of weights; return what the engines prepare from."""
        return self.group.call(TrainerWorker.prepare_sync, self.group.put(setup), dispatch=PREPARE)

    def begin_connect(self, transfer_group: TransferGroup) -> WorkerFuture[None]:
        """Begin to connect to disaggregated engines, which must join at the same time."""
        return self.group.begin(TrainerWorker.connect_engines, transfer_group, dispatch=BROADCAST)

    def begin_push(self, request: PushRequest | None) -> WorkerFuture[PushResult]:
        """Begin to push the current weights to the engines, which have to receive at the same time."""
        return self.group.begin(TrainerWorker.push_weights, request, dispatch=PUSH)

    def sum_weights(self) -> list[PartSums]:
        """Return by rank the sums of what it holds of the engines' weights."""
        return self.group.call(TrainerWorker.sum_weights, None, dispatch=_SUM_WEIGHTS)

    def offload(self) -> OffloadStats:
        """Move what only training needs to host memory; return the totals of all ranks."""
        return self.group.call(TrainerWorker.offload, self.offload_config, dispatch=_OFFLOAD)

    def save_hf(self, folder: str) -> None:
        """Write the model to `folder` in Hugging Face format."""
        self.group.call(TrainerWorker.save_hf, folder, dispatch=BROADCAST)

    def begin_save(self, request: SaveRequest) -> SaveStats:
        """Begin to save the training state; returns when training may continue. `finish_save` must follow."""
        self._is_save_written = None
        return self.group.call(TrainerWorker.begin_save, request, dispatch=_BEGIN_SAVE)

    def is_save_written(self) -> bool:
        """Return whether all files are written, so that `finish_save` will not block.

        The ranks are called only if they have not trained since the last call: each training step reports it as well.
        """
        reported, self._is_save_written = self._is_save_written, None
        if reported is None:
            return self.group.call(TrainerWorker.is_save_written, None, dispatch=_IS_WRITTEN)
        return reported

    def wait_save_written(self) -> None:
        """Block until all files are written, or a rank has failed to; ranks report it, they are not polled."""
        self.group.call(TrainerWorker.wait_save_written, None, dispatch=BROADCAST)

    def finish_save(self) -> SavedShard:
        """Block until all files are written; return the files of all ranks."""
        return self.group.call(TrainerWorker.finish_save, None, dispatch=_FINISH_SAVE)

    def load_training(self, folder: str) -> LoadReport:
        """Load the training state from `folder`, which may have been saved in another parallel layout."""
        return self.group.call(TrainerWorker.load_training, folder, dispatch=_LOAD)


def _join_sums(results: Sequence[list[PartSums]], _: RankGrid) -> list[PartSums]:
    return [sums for of_rank in results for sums in of_rank]


_SUM_WEIGHTS: Dispatch[None, list[PartSums]] = Dispatch(to_all, _join_sums)


def _sum_offload_stats(results: Sequence[OffloadStats], _: RankGrid) -> OffloadStats:
    return reduce(add, results)


def _sum_save_stats(results: Sequence[SaveStats], _: RankGrid) -> SaveStats:
    return SaveStats(
        staging_bytes=sum(r.staging_bytes for r in results),
        bytes=sum(r.bytes for r in results),
        seconds=max(r.seconds for r in results),
    )


def _merge_saved_shards(results: Sequence[SavedShard], _: RankGrid) -> SavedShard:
    files = tuple(file for result in results for file in result.files)
    return SavedShard(files=files, write_seconds=max(r.write_seconds for r in results))


def _merge_load_reports(results: Sequence[LoadReport], _: RankGrid) -> LoadReport:
    return LoadReport(same_layout=all(r.same_layout for r in results), bytes=sum(r.bytes for r in results))


_BEGIN_SAVE: Dispatch[SaveRequest, SaveStats] = Dispatch(to_all, _sum_save_stats)
_IS_WRITTEN: Dispatch[None, bool] = Dispatch(to_all, lambda results, _: all(results))
_FINISH_SAVE: Dispatch[None, SavedShard] = Dispatch(to_all, _merge_saved_shards)
_LOAD: Dispatch[str, LoadReport] = Dispatch(to_all, _merge_load_reports)
_OFFLOAD: Dispatch[OffloadConfig, OffloadStats] = Dispatch(to_all, _sum_offload_stats)


def make_trainer_group(config: StageConfig, processes: Processes) -> TrainerGroup:
    """Create the stage's trainer group, as the role `trainer` in `processes`."""
    model, _ = load_architecture_and_dtype(config.model.path, family=config.model.family)
    group = processes.group("trainer", RankGrid.of(config.trainer.parallel, processes.size))
    shared = not (isinstance(config, RunConfig) and config.disaggregated)
    offload_config = config.trainer.offload.resolved(processes.device, shared=shared)
    return TrainerGroup(group, cost=sequence_cost(model), offload_config=offload_config)


def make_rank_processes(pool: SlotPool, name: str) -> WorkerProcesses:
    """Create a process for Megatron ranks on each slot of the pool; `name` is used in error messages."""
    return WorkerProcesses(name, pool, rank_environment(pool.device, pool.gpus))


def read_gpu_bytes() -> int:
    """Return the memory of the GPU of this process, a Megatron rank, in bytes."""
    from megarl.megatron.runtime import platform  # imports torch

    return platform.device_bytes()


def rank_environment(device: str, gpus: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment variables of a Megatron rank's process; on CUDA those that are set here win.

    Args:
        gpus: names of the types of the ranks' GPUs, as far as they are known.
    """
    if device == "cpu":
        # more threads would compete for the cores of other ranks, and change results
        return {"OMP_NUM_THREADS": "1"}
    # torch's own allocator settings stay as they are: expandable segments are not turned on, see docs/cluster.md
    if MAX_CONNECTIONS in os.environ:
        return {MAX_CONNECTIONS: os.environ[MAX_CONNECTIONS]}
    # before Blackwell, tensor-parallel communication overlaps as intended only with one queue
    types = [find_gpu_type(name) for name in gpus]
    is_blackwell = bool(types) and all(gpu is not None and gpu.capability >= BLACKWELL for gpu in types)
    return {} if is_blackwell else {MAX_CONNECTIONS: "1"}


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
