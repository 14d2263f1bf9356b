"""The Megatron trainer ranks as the controller calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Generic, TypeVar

from megarl.batch.balance import SequenceCost
from megarl.config import RunConfig, StageConfig
from megarl.config.trainer import OffloadConfig
from megarl.megatron.families.cost import sequence_cost
from megarl.megatron.families.load_architecture import read_model
from megarl.megatron.requests import (
    ADD_UP,
    EvaluationWork,
    Invitation,
    Key,
    LoadReport,
    ModelSpec,
    SavedPart,
    SaveOrder,
    SaveStats,
    SyncSetup,
    TokenColumn,
    TrainerSpec,
    TrainStats,
    TrainWork,
    evaluation_transfer,
    train_transfer,
)
from megarl.megatron.trainer_worker import Evaluator, FrozenWorker, TrainerWorker
from megarl.placement.pool import SlotPool
from megarl.placement.rank_grid import RankGrid
from megarl.workers.dispatch import BROADCAST, Transfer, from_first, to_all
from megarl.workers.group import Group, Pending, Processes, WorkerProcesses
from megarl.workers.payload import Payload

if TYPE_CHECKING:
    from megarl.megatron.runtime.offload import OffloadStats
    from megarl.reshard.planning.strategy import SyncStats
    from megarl.reshard.transfer.process_groups import Meeting

W = TypeVar("W", bound=Evaluator)


class ModelGroup(Generic[W]):
    """A model that can be evaluated, on every rank of a group; see `Evaluator`."""

    def __init__(self, group: Group[W], *, cost: SequenceCost) -> None:
        """`cost`: what micro-batches are balanced by."""
        self.group = group
        self._evaluated = evaluation_transfer(cost)

    @property
    def grid(self) -> RankGrid:
        """Which rank does what."""
        return self.group.grid

    def logprobs(self, work: EvaluationWork) -> Payload[TokenColumn]:
        """The tokens' log-probabilities."""
        return self.group.keep(Evaluator.logprobs, work, via=self._evaluated)

    def values(self, work: EvaluationWork) -> Payload[TokenColumn]:
        """Of a value model: what it expects before each token."""
        return self.group.keep(Evaluator.values, work, via=self._evaluated)

    def scores(self, work: EvaluationWork) -> Mapping[Key, float]:
        """Of a value model: what it says of each trajectory as a whole."""
        return self.group.call(Evaluator.scores, work, via=self._evaluated)


class FrozenGroup(ModelGroup[FrozenWorker]):
    """A model that never changes."""

    def start_workers(self, spec: ModelSpec) -> Pending[None]:
        """Build the model on every rank."""
        return self.group.start(FrozenWorker, (spec,))


class TrainerGroup(ModelGroup[TrainerWorker]):
    """A model that trains."""

    def __init__(self, group: Group[TrainerWorker], *, cost: SequenceCost, offloaded: OffloadConfig) -> None:
        """`offloaded`: resolved."""
        super().__init__(group, cost=cost)
        self._split_by_dp = train_transfer(cost)
        self.offloaded = offloaded
        """What `offload` moves."""

    def start_workers(self, spec: TrainerSpec) -> Pending[None]:
        """Build model and optimizer on every rank."""
        return self.group.start(TrainerWorker, (spec,))

    def train_step(self, work: TrainWork) -> TrainStats:
        """Train on the work, split over the data-parallel replicas."""
        return self.group.call(TrainerWorker.train_step, work, via=self._split_by_dp)

    def begin_train_step(self, work: TrainWork) -> Pending[TrainStats]:
        """As `train_step`, returning at once where ranks are other processes; steps run in the order of beginning."""
        return self.group.begin(TrainerWorker.train_step, work, via=self._split_by_dp)

    def prepare_sync(self, setup: SyncSetup) -> Invitation | None:
        """Plan how weights travel from now on; what engines need to know that receive them themselves."""
        return self.group.call(TrainerWorker.prepare_sync, setup, via=_PREPARE)

    def begin_join(self, meeting: Meeting) -> Pending[None]:
        """Connect with engines that receive the weights themselves, and which have to join at the same time."""
        return self.group.begin(TrainerWorker.join_engines, meeting, via=BROADCAST)

    def push_weights(self) -> SyncStats:
        """Deliver the current weights."""
        return self.begin_push().result()

    def begin_push(self) -> Pending[SyncStats]:
        """As `push_weights`, returning at once: engines that receive the weights themselves do so meanwhile."""
        return self.group.begin(TrainerWorker.push_weights, None, via=ADD_UP)

    def offload(self) -> OffloadStats:
        """Free the devices of what training alone needs; of all ranks together."""
        return self.group.call(TrainerWorker.offload, self.offloaded, via=_OFFLOAD)

    def onload(self) -> OffloadStats:
        """Bring it back; of all ranks together."""
        return self.group.call(TrainerWorker.onload, None, via=_ONLOAD)

    def save_hf(self, folder: str) -> None:
        """Write the model in Hugging Face format."""
        self.group.call(TrainerWorker.save_hf, folder, via=BROADCAST)

    def begin_save(self, order: SaveOrder) -> SaveStats:
        """Save the training state, and return when training may go on; `finish_save` has to follow."""
        return self.group.call(TrainerWorker.begin_save, order, via=_BEGIN_SAVE)

    def save_is_written(self) -> bool:
        """`finish_save` need not wait."""
        return self.group.call(TrainerWorker.save_is_written, None, via=_IS_WRITTEN)

    def finish_save(self) -> SavedPart:
        """Wait until all is written; every rank's files."""
        return self.group.call(TrainerWorker.finish_save, None, via=_FINISH_SAVE)

    def load_training(self, folder: str) -> LoadReport:
        """Go on from the training state in `folder`, which may be of another layout."""
        return self.group.call(TrainerWorker.load_training, folder, via=_LOAD)


_PREPARE: Transfer[SyncSetup, Invitation | None] = Transfer(to_all, from_first)


def _total(results: Sequence[OffloadStats], _: RankGrid) -> OffloadStats:
    return reduce(add, results)


def _began(results: Sequence[SaveStats], _: RankGrid) -> SaveStats:
    return SaveStats(
        staging_bytes=sum(r.staging_bytes for r in results),
        bytes=sum(r.bytes for r in results),
        seconds=max(r.seconds for r in results),
    )


def _written(results: Sequence[SavedPart], _: RankGrid) -> SavedPart:
    files = tuple(file for result in results for file in result.files)
    return SavedPart(files=files, write_seconds=max(r.write_seconds for r in results))


def _loaded(results: Sequence[LoadReport], _: RankGrid) -> LoadReport:
    return LoadReport(same_layout=all(r.same_layout for r in results), bytes=sum(r.bytes for r in results))


_BEGIN_SAVE: Transfer[SaveOrder, SaveStats] = Transfer(to_all, _began)
_IS_WRITTEN: Transfer[None, bool] = Transfer(to_all, lambda results, _: all(results))
_FINISH_SAVE: Transfer[None, SavedPart] = Transfer(to_all, _written)
_LOAD: Transfer[str, LoadReport] = Transfer(to_all, _loaded)
_OFFLOAD: Transfer[OffloadConfig, OffloadStats] = Transfer(to_all, _total)
_ONLOAD: Transfer[None, OffloadStats] = Transfer(to_all, _total)


def trainer_on(config: StageConfig, processes: Processes) -> TrainerGroup:
    """The stage's trainer, as the role `trainer` in `processes`."""
    model, _ = read_model(config.model.path)
    group = processes.group("trainer", RankGrid.of(config.trainer.parallel, processes.size))
    shared = not (isinstance(config, RunConfig) and config.engines_apart)
    offloaded = config.trainer.offload.resolved(processes.device, shared=shared)
    return TrainerGroup(group, cost=sequence_cost(model), offloaded=offloaded)


def rank_processes(pool: SlotPool, name: str) -> WorkerProcesses:
    """A process for Megatron ranks on every slot; `name` is for errors."""
    return WorkerProcesses(name, pool, rank_environment(pool.device))


def rank_environment(device: str) -> dict[str, str]:
    """Variables of the process of a Megatron rank."""
    # One thread a rank: more would fight over the cores that other ranks have, and a result that depends on the
    # number of threads is not reproducible. Sequence parallelism on CUDA overlaps as intended with one queue only.
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if device == "cuda" else {"OMP_NUM_THREADS": "1"}
