"""Pushes weights to the engines, and moves device memory between the trainer and them between phases."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from megarl.groups.engine_weights import EngineWeights
from megarl.run.run_totals import RunTotals
from megarl.run.step_memory import Phase, StepMemory
from megarl.supervision.run_monitor import RunMonitor


class PolicySync:
    """The weights on the engines, those of the policy if nothing else is asked, and the memory that both share."""

    def __init__(
        self,
        weights: EngineWeights,
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

    def push_policy(self, policy_version: int) -> None:
        """Push the policy's weights to the engines."""
        self._weights.select(None)
        self._push(policy_version)

    def serve(self, model: str | None) -> None:
        """Push the weights of a trained model, None: of the policy, if the engines hold another one's.

        Raises:
            ConfigError: engines cannot serve the model.
        """
        if self._weights.select(model):
            self._push(self._weights.policy_version)

    def _push(self, policy_version: int) -> None:
        """Push the weights of the selected model, and record the time and bytes of the sync."""
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
            self._push(self._weights.policy_version)
        return self._memory.begin_sampling()

    def begin_scoring(self, model: str = "") -> None:
        """Free device memory for a forward pass of an auxiliary model, or of the policy."""
        if model not in self._dedicated:
            self._memory.begin_scoring()

    def begin_update(self, model: str = "") -> None:
        """Free device memory for an update of an auxiliary model, or for a save of the policy."""
        if model:
            self._weights.mark_outdated(model)
        if model not in self._dedicated:
            self._memory.begin_update()

    def begin_training(self) -> None:
        """Free device memory for an update of the policy, after which the engines are outdated."""
        self._weights.mark_outdated(None)
        self._memory.begin_training()
