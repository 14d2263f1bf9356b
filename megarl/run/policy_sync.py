"""Pushes the policy's weights to the engines, and moves device memory between its trainer and them between phases."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from megarl.groups.weight_sync import WeightSync
from megarl.run.run_totals import RunTotals
from megarl.run.step_memory import Phase, StepMemory
from megarl.supervision.run_monitor import RunMonitor


class PolicySync:
    """The policy's weights on the engines, and the device memory that trainer and engines share."""

    def __init__(
        self,
        weights: WeightSync,
        memory: StepMemory,
        phase: Phase,
        totals: RunTotals,
        *,
        dedicated: AbstractSet[str],
        monitor: RunMonitor | None = None,
    ) -> None:
        """Args:
        totals: receives the bytes of each push.
        dedicated: names of the auxiliary models with slots of their own, which need no room on the engines' devices.
        monitor: receives the policy version of each push; None: not monitored.
        """
        self._weights, self._memory, self._phase, self._totals = weights, memory, phase, totals
        self._dedicated, self._monitor = dedicated, monitor
        self.metrics: Mapping[str, float] = {}
        """Metrics of the last push: seconds, bytes, buckets."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that the engines hold, or were pushed last."""
        return self._weights.policy_version

    def push(self, policy_version: int) -> None:
        """Push the trainer's weights to the engines, and record the time and bytes of the sync."""
        self._memory.begin_push()
        with self._phase("weight_sync"):
            report = self._weights.push(policy_version)
        if self._monitor is not None:
            self._monitor.heartbeat.pushed(policy_version)
        self._totals.weight_sync_bytes += report.bytes_moved
        self.metrics = {
            "weight_sync/seconds": sum(report.seconds.values()),
            "weight_sync/bytes": report.bytes_moved,
            "weight_sync/buckets": report.stats.buckets,
            **{f"weight_sync/{name}_seconds": seconds for name, seconds in report.seconds.items()},
            **report.delta_metrics(),
        }

    def begin_sampling(self) -> dict[str, float]:
        """Free device memory for the engines, as configured by `trainer.offload` and `rollout.engine`; return metrics.

        Engines that have released their weights for an update of another model receive the same version again.
        """
        if self._memory.needs_push:
            self.push(self._weights.policy_version)
        return self._memory.begin_sampling()

    def begin_scoring(self, model: str = "") -> None:
        """Free device memory for a forward pass of an auxiliary model, or of the policy."""
        if model not in self._dedicated:
            self._memory.begin_scoring()

    def begin_update(self, model: str = "") -> None:
        """Free device memory for an update of an auxiliary model, or for a save of the policy."""
        if model not in self._dedicated:
            self._memory.begin_update()

    def begin_training(self) -> None:
        """Free device memory for an update of the policy, after which the engines are outdated."""
        self._weights.is_outdated = True
        self._memory.begin_training()
