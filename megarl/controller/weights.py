"""Handing the policy's weights from the trainer to the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config.weight_sync import WeightSyncConfig
from megarl.controller.engines import EngineGroup
from megarl.controller.trainer_group import TrainerGroup
from megarl.megatron.work import SyncSetup
from megarl.reshard.strategy import Outlets, SyncStats
from megarl.tracking.phases import PhaseTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """One push."""

    stats: SyncStats
    seconds: Mapping[str, float]
    """`open`: until the engines have stopped decoding; `transfer`; `commit`: until they decode again."""

    @property
    def bytes_moved(self) -> int:
        """Between trainer ranks and to engines."""
        return self.stats.bytes_received + self.stats.bytes_delivered


class WeightSync:
    """Engines take a new version only once all of it has arrived at all of them."""

    def __init__(self, config: WeightSyncConfig, trainer: TrainerGroup, engines: EngineGroup) -> None:
        self._trainer, self._engines = trainer, engines
        trainer.prepare_sync(SyncSetup(config=config, outlets={0: Outlets(whole=engines.sinks())}))
        self.policy_version = -1
        """What the engines hold; -1 before the first push."""

    def push(self, policy_version: int) -> PushReport:
        """Give the engines the trainer's current weights, as `policy_version`.

        Raises:
            WeightSyncError: they did not arrive whole; the engines refuse to serve until a push succeeds.
        """
        timer = PhaseTimer()
        with timer.phase("open"):
            self._engines.call("begin_weights")
        with timer.phase("transfer"):
            stats = self._trainer.push_weights()
        with timer.phase("commit"):
            self._engines.call("end_weights", policy_version)
        self.policy_version = policy_version
        return PushReport(stats=stats, seconds=timer.totals)
