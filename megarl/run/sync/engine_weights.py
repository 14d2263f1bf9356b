"""The weights on the engines: those of the policy, or of another language model that the run trains.

Engines serve one model at a time. Each model has a `WeightSync` of its own. A push of another model than the last one
connects the engines with its ranks again and sends all weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from megarl.cluster.placement.pool import SlotPool
from megarl.config import RunConfig
from megarl.errors import ConfigError
from megarl.run.memory.step_ledger import Phase, StepMemory
from megarl.run.remote.auxiliary_models import AuxiliaryModels
from megarl.run.remote.engine_group import EngineGroup
from megarl.run.remote.trainer_group import TrainerGroup
from megarl.run.run_state import RunTotals
from megarl.run.supervision.run_monitor import RunMonitor
from megarl.run.sync.sync_update import PushReport
from megarl.run.sync.weight_sync import WeightSync


class EngineWeights:
    """Pushes the weights of the policy, or of the trained model that is selected, to the engines."""

    def __init__(
        self, config: RunConfig, trainer: TrainerGroup, models: AuxiliaryModels, engines: EngineGroup, pool: SlotPool
    ) -> None:
        """Connect the ranks of the policy with the engines; `pool`: slots of the policy."""
        self._config, self._models, self._engines, self._pool = config, models, engines, pool
        self._syncs: dict[str | None, WeightSync] = {None: WeightSync(config, trainer, engines, pool)}
        self._selected: str | None = None

    @property
    def policy_version(self) -> int:
        """Version of the last push; -1 before the first one."""
        return self._syncs[self._selected].policy_version

    def select(self, model: str | None) -> bool:
        """Choose whose weights pushes send, None: the policy's; return whether the engines hold those of another model.

        Raises:
            ConfigError: engines cannot serve the model.
        """
        if model == self._selected:
            return False
        if model is not None:
            self._require_servable(model)
        before, self._selected = self._syncs[self._selected], model
        before.release_engines()
        if model not in self._syncs:
            assert model is not None
            self._syncs[model] = WeightSync(self._config, self._models.trained[model], self._engines, self._pool)
        self._syncs[model].policy_version = before.policy_version
        return True

    def push(self, policy_version: int) -> PushReport:
        """Push the weights of the selected model as `policy_version`; raises as `WeightSync.push`."""
        return self._syncs[self._selected].push(policy_version)

    def mark_outdated(self, model: str | None) -> None:
        """Note that a model, None: the policy, has newer weights than were pushed; no-op for one that was never."""
        if model in self._syncs:
            self._syncs[model].is_outdated = True

    def _require_servable(self, model: str) -> None:
        kind, names = self._config.algorithm.type, sorted(self._models.trained)
        if model not in self._models.trained:
            raise ConfigError(
                f"algorithm.type: {kind} lets engines serve the model {model!r}, which is none of the models that it "
                f"trains: {', '.join(names) or 'none'}"
            )
        if model in self._models.dedicated:
            raise ConfigError(
                f"placement.{model}: {kind} lets engines serve this model, which needs the slots of the policy then, "
                "got a pool of its own"
            )
        head = next(each.head for each in self._config.auxiliary_models if each.name == model)
        if head != "lm":
            raise ConfigError(
                f"algorithm.type: {kind} lets engines serve the model {model!r}, which needs to be a language model, "
                f"got one with the head {head!r}"
            )


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
