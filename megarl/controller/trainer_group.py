"""The Megatron trainer ranks as the controller calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.config import StageConfig
from megarl.megatron.work import ADD_UP, SPLIT_BY_DP, SyncSetup, TrainerSpec, TrainStats, TrainWork
from megarl.megatron.worker import TrainerWorker
from megarl.placement.grid import RankGrid
from megarl.placement.pool import SlotPool
from megarl.workers.group import Pending, WorkerGroup
from megarl.workers.transfers import BROADCAST

if TYPE_CHECKING:
    from megarl.reshard.strategy import SyncStats


class TrainerGroup(WorkerGroup[TrainerWorker]):
    """One Megatron rank per slot."""

    def __init__(self, config: StageConfig, pool: SlotPool) -> None:
        parallel = config.trainer.parallel
        grid = RankGrid(tp=parallel.tp, cp=parallel.cp, dp=config.dp, pp=parallel.pp)
        super().__init__("trainer", pool, grid, _environment(pool.device))

    def start_workers(self, spec: TrainerSpec) -> Pending[None]:
        """Build model and optimizer on every rank."""
        return self.start(TrainerWorker, (spec,))

    def train_step(self, work: TrainWork) -> TrainStats:
        """Train on the work, split over the data-parallel replicas."""
        return self.call(TrainerWorker.train_step, work, via=SPLIT_BY_DP)

    def begin_train_step(self, work: TrainWork) -> Pending[TrainStats]:
        """As `train_step`, returning at once; steps run in the order they were begun."""
        return self.begin(TrainerWorker.train_step, work, via=SPLIT_BY_DP)

    def prepare_sync(self, setup: SyncSetup) -> None:
        """Plan how weights travel from now on."""
        self.call(TrainerWorker.prepare_sync, setup, via=BROADCAST)

    def push_weights(self) -> SyncStats:
        """Deliver the current weights."""
        return self.call(TrainerWorker.push_weights, None, via=ADD_UP)

    def save_hf(self, folder: str) -> None:
        """Write the model in Hugging Face format."""
        self.call(TrainerWorker.save_hf, folder, via=BROADCAST)


def _environment(device: str) -> dict[str, str]:
    # One thread a rank: more would fight over the cores that other ranks have, and a result that depends on the
    # number of threads is not reproducible. Sequence parallelism on CUDA overlaps as intended with one queue only.
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if device == "cuda" else {"OMP_NUM_THREADS": "1"}
