"""Weight sync: pushes the weights of the policy, or of another model that the run trains, to the engines.

Colocated engines: each trainer rank gathers what the engine rank on its slot needs, and passes it on in shared memory.
Disaggregated engines (slots of their own) receive the weights over the network.

A push (`SyncUpdate`) is one call of all trainer ranks and engines at the same time, which wait for each other. Engines
report to a store that they have received everything; when all have, the controller lets them serve it
(`commit_decision.py`):

    controller                          trainer ranks                 engines
    call ----------------------------->  push        boxes ------->    begin, receive
    wait: all have sent                                                report "received" to the store
    wait: all have received <----------------------------------------
    bytes, weights compared; decide ------------------------------>    end: serve the weights, or abort

Engines serve one model at a time. Each model has connections of its own (`ModelSync`).

If an engine is lost during a push, it is restarted and the push is retried. An engine that is restarted between two
pushes receives the version that the others serve, while they continue to serve.

With `weight_sync.delta`, a push sends only the elements that have changed since the latest sync that engines and
trainer ranks have in common. If engines then differ from the trainer (`weight_sync.verify`), all weights are sent.

    sync 7   full    engines 0, 1     base of both: 7
    sync 8   delta   engines 0, 1     base of both: 8
    sync 9   full    engine 1         it was restarted; base of engine 1: 9, of engine 0: 8
    sync 10  full    engines 0, 1     the trainer ranks have copies of sync 9, engine 0 has not received it

Trainer ranks keep copies of the latest sync only, over connections that they have not made again since. Without a base,
as after a failed sync, the sync is full.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass

from megarl.cluster.placement.pool import SlotPool
from megarl.cluster.workers.group import RemoteCall, WorkerFuture
from megarl.config import RunConfig
from megarl.engines.engine import EngineUpdate, UpdateReport
from megarl.errors import ConfigError, MegarlError, OutdatedEngineError, WeightDifferenceError, WeightSyncError
from megarl.megatron.requests import PushResult, sum_sync_stats
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.planning.strategy import DeltaUpdate, SyncStats
from megarl.reshard.transfer.commit_decision import CommitDecision, CommitSpec, first_line
from megarl.reshard.transfer.heartbeat import SyncMonitor
from megarl.reshard.transfer.weight_sums import add_parts
from megarl.run.memory.step_ledger import Phase, StepMemory
from megarl.run.remote.engine_group import EngineGroup, EngineHandles
from megarl.run.remote.trainer_group import AuxiliaryModels, TrainerGroup
from megarl.run.run_state import RunTotals
from megarl.run.supervision.engine_supervisor import EngineSupervisor
from megarl.run.supervision.restart_budget import name_some
from megarl.run.supervision.run_monitor import RunMonitor
from megarl.run.sync.sync_connections import (
    REPORT_GRACE_SECONDS,
    ColocatedConnections,
    DisaggregatedConnections,
    SyncConnections,
)
from megarl.tracking.timing import PhaseTimer


def verify_weights(
    trainer: TrainerGroup, engines: EngineHandles, layouts: Sequence[WeightLayout], policy_version: int
) -> None:
    """Compare the sums of all weights of every engine with the trainer's, within an update that has not ended.

    Args:
        layouts: of each engine, by TP rank.

    Raises:
        WeightDifferenceError: some differ; names tensor, box, engine and TP rank. The engine serves no requests until
            an update succeeds.
        WeightSyncError: trainer ranks hold different values of the same weights.
    """
    expected = add_parts(layouts, trainer.sum_weights())
    found = engines.call("verify_weights", expected)
    problems = [f"{engine.name}: {p}" for engine, p in zip(engines.engines, found, strict=True) if p is not None]
    if problems:
        raise WeightDifferenceError(f"version {policy_version}: {'; '.join(problems)}")


POLL_SECONDS = 0.02
"""How often the controller looks whether all engines have received everything, once the trainer ranks have sent it."""

CAUSE_SECONDS = 2.0
"""How long an engine may take to report why it has not received what the trainer ranks have sent."""

CLOSE_SECONDS = 5.0
"""How long engines may take to abort an update."""

SETTLE_LIMITS = 3
"""Time limit, in multiples of `abort_seconds`, for trainer ranks to complete a push after an engine was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """Volume and timing of one push."""

    stats: SyncStats
    seconds: Mapping[str, float]
    """Seconds by phase: `open`, until the engines have stopped decoding; `transfer`; `verify`, if the engines' weights
    are compared; `commit`, until the engines resume."""
    bytes_moved: int
    """Bytes sent between trainer ranks and to engines."""
    bytes_saved: int = 0
    """Bytes of weights that a push of all weights would have sent in addition."""
    delta: DeltaUpdate | None = None
    """What the push was allowed to leave out."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics `weight_sync/...`, with those of what the push has left out if weights are compared."""
        stats = self.stats
        metrics = {
            "weight_sync/seconds": sum(self.seconds.values()),
            "weight_sync/bytes": self.bytes_moved,
            "weight_sync/buckets": stats.buckets,
            **{f"weight_sync/{name}_seconds": seconds for name, seconds in self.seconds.items()},
        }
        if self.delta is None:
            return metrics
        return metrics | {
            "weight_sync/is_full": float(self.delta.base is None),
            "weight_sync/bytes_saved": self.bytes_saved,
            "weight_sync/changed_share": stats.changed_elements / max(stats.elements, 1),
            "weight_sync/copied_bytes": stats.copied_bytes,
        }


class SyncUpdate:
    """One push to some engines, over connections that exist."""

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineHandles,
        connections: SyncConnections,
        *,
        number: int,
        policy_version: int,
        delta: DeltaUpdate | None,
    ) -> None:
        """`number`: unique in the run; `delta`: what the push may leave out, None: nothing."""
        assert connections.setup is not None
        self.number, self.engines, self.setup = number, engines, connections.setup
        self._trainer, self._connections, self._config = trainer, connections, connections.setup.config
        self._store = connections.stores[-1]
        commit = CommitSpec(self._store.host, self._store.port, f"update {number}", len(engines.engines))
        self._decision = CommitDecision(commit, self._store)
        receives = not self.setup.senders
        self._update = EngineUpdate(policy_version=policy_version, commit=commit, receives=receives, delta=delta)
        self.breaks_trainer = False
        """Whether the trainer ranks have failed in their part, which breaks the connections between them."""

    def run(self) -> PushReport:
        """Push, as `WeightSync.push`; if anything fails, the engines abort the update."""
        timer, reason = PhaseTimer(), "the controller was interrupted"
        if not self._update.receives:  # the trainer ranks load full tensors into an update that is open
            with timer.phase("open"):
                self.engines.call("begin_weights")
        updating: RemoteCall[list[UpdateReport]] = self.engines.begin("update_weights", self._update)
        try:
            with timer.phase("transfer"):
                sent = self._send(updating)
                self._wait_received(sent, updating)
            verify, version = self._config.verify, self._update.policy_version
            if verify is not None and version % verify.every == 0:
                with timer.phase("verify"):
                    verify_weights(self._trainer, self.engines, self.setup.engine, version)
            reason = ""
        except MegarlError as error:
            reason = first_line(error)
            raise
        finally:
            self._decision.decide(reason)
            if reason:
                updating.settle(CLOSE_SECONDS)
        with timer.phase("commit"):
            reports = updating.result(self._config.timeout_seconds)
        return self._report(sent, reports, timer.totals)

    def _send(self, updating: RemoteCall[list[UpdateReport]]) -> PushResult:
        """Wait until all trainer ranks have sent the weights.

        If an engine fails meanwhile, trainer ranks whose connections do not depend on it are waited for as well.
        """
        heartbeat = self.setup.heartbeat
        with nullcontext() if heartbeat is None else SyncMonitor(heartbeat, self._store):
            self.breaks_trainer = True
            pushing = self._trainer.begin_push(self._connections.request(self.engines, self._update.delta))
            assert isinstance(pushing, RemoteCall), "engines need trainer ranks in worker processes"
            try:
                sent: PushResult = pushing.result_with(updating, self._config.timeout_seconds + REPORT_GRACE_SECONDS)
            except MegarlError as error:
                self._decision.decide(first_line(error))
                self.breaks_trainer = not (self._connections.survives_engines and self._is_completed(pushing))
                if self.breaks_trainer:
                    raise
                failure = error  # raised outside of the monitor, which would abort the sync on the trainer ranks
            else:
                self.breaks_trainer = False
                return sent
        raise failure

    def _is_completed(self, pushing: WorkerFuture[PushResult]) -> bool:
        """Return whether the trainer ranks complete their part without the engine that has failed."""
        try:
            pushing.result(SETTLE_LIMITS * self._config.abort_seconds + REPORT_GRACE_SECONDS)
        except MegarlError:
            return False
        return True

    def _wait_received(self, sent: PushResult, updating: RemoteCall[list[UpdateReport]]) -> None:
        """Wait until all engines have received the weights; raises WeightSyncError if one has not, or not all bytes."""
        if sent.undelivered:
            updating.raise_failure(CAUSE_SECONDS)
            raise WeightSyncError("; ".join(sent.undelivered))
        end = time.monotonic() + self._config.timeout_seconds
        while not self._decision.has_everyone_received():
            updating.raise_failure(POLL_SECONDS)
            if time.monotonic() > end:
                seconds = f"{self._config.timeout_seconds:g} s"
                raise WeightSyncError(f"some engines have not received all weights {seconds} after they were sent")
        at_engines = self._decision.transferred()
        num_sent = sent.stats.bytes_sent + at_engines.bytes_sent
        num_received = sent.stats.bytes_received + at_engines.bytes_received
        if num_sent != num_received:
            raise WeightSyncError(f"the ranks sent {num_sent} bytes and received {num_received}")

    def _report(self, sent: PushResult, reports: Sequence[UpdateReport], seconds: Mapping[str, float]) -> PushReport:
        stats = sum_sync_stats([sent.stats, *(each for report in reports for each in report.stats)])
        opening = max(report.open_seconds for report in reports)  # during `transfer`, unless it was a call of its own
        phases = {"open": 0.0} | dict(seconds)
        phases["open"] += opening
        phases["transfer"] = max(0.0, phases["transfer"] - opening)
        moved, saved = stats.bytes_received, stats.bytes_not_received
        if not any(report.stats for report in reports):  # the trainer ranks deliver what they have received
            moved, saved = moved + stats.bytes_delivered, saved + stats.bytes_not_delivered
        return PushReport(stats=stats, seconds=phases, bytes_moved=moved, bytes_saved=saved, delta=self._update.delta)


class ModelSync:
    """Pushes one model; engines switch to a version only after all ready engines have received all of it."""

    def __init__(self, config: RunConfig, trainer: TrainerGroup, engines: EngineGroup, pool: SlotPool) -> None:
        """Connect the model's ranks and the engines; `pool`: slots of the model."""
        self._config, self._trainer, self._engines = config, trainer, engines
        arrangement = DisaggregatedConnections if config.disaggregated else ColocatedConnections
        self._connections = arrangement(config, trainer, engines, pool)
        self.num_updates = 0
        """Number of pushes that have begun, those to restarted engines included."""
        self._latest: SyncUpdate | None = None
        """What a delta builds on; None: nothing has been pushed, or the latest push has failed."""
        self.is_outdated = False
        """Whether the trainer has newer weights than the engines, which a restarted engine then waits for."""
        self._retry_on_engine_loss(self._connections.connect)

    def push(self, policy_version: int) -> PushReport:
        """Push the model's current weights to all ready engines; as `WeightSync.push`."""

        def push(ready: Sequence[int]) -> PushReport:
            report = self._push(ready, policy_version)
            self._engines.supervisor.mark_serving(ready)
            return report

        report = self._retry_on_engine_loss(push)
        self.is_outdated = False
        return report

    def restore(self, replicas: Sequence[int], policy_version: int) -> Sequence[int]:
        """Push `policy_version` to restarted engines; as `WeightSync.restore`."""
        supervisor = self._engines.supervisor
        if not self._connections.survives_engines and not set(replicas).issuperset(supervisor.serving):
            return ()  # all ranks would connect with these engines now, and with all engines for the next push
        if self.is_outdated:
            names = name_some([self._engines.name(replica) for replica in replicas])
            was, needs = ("was", "needs") if len(replicas) == 1 else ("were", "need")
            raise OutdatedEngineError(f"{names} {was} restarted and {needs} the next weights")
        while receivers := sorted(set(replicas).intersection(supervisor.ready)):
            try:
                self._push(receivers, policy_version)
                break
            except MegarlError as error:  # retry if a lost engine caused the failure
                if not supervisor.attribute_failure(error):
                    raise
        if self._trainer.offload_config.is_enabled:
            self._trainer.offload()
        return receivers

    def release_engines(self) -> None:
        """Note that another model's weights are pushed next: a later push connects the engines again, and sends all."""
        self._connections.drop(trainer=False)
        self._latest = None

    def _retry_on_engine_loss[T](self, work: Callable[[Sequence[int]], T]) -> T:
        """Return `work(ready replicas)`; retry it if it fails because an engine was lost."""
        supervisor = self._engines.supervisor
        while True:
            try:
                return work(supervisor.wait_ready())
            except MegarlError as error:
                if not supervisor.attribute_failure(error):
                    raise

    def _push(self, replicas: Sequence[int], policy_version: int) -> PushReport:
        connections = self._connections
        engines = connections.connect(replicas)
        self.num_updates += 1
        delta = self._next_delta(engines)
        update = SyncUpdate(
            self._trainer, engines, connections, number=self.num_updates, policy_version=policy_version, delta=delta
        )
        self._latest = None  # until the push has succeeded
        try:
            report = update.run()
        except MegarlError as error:
            connections.drop(trainer=update.breaks_trainer)
            if isinstance(error, WeightDifferenceError) and delta is not None and delta.base is not None:
                sys.stderr.write(f"{error}; all weights are sent again\n")
                return self._push(replicas, policy_version)
            if isinstance(error, WeightSyncError) and connections.rank_legend:
                raise type(error)(f"{error} ({connections.rank_legend})") from error
            raise
        self._latest = update
        return report

    def _next_delta(self, engines: EngineHandles) -> DeltaUpdate | None:
        """Return what the next update may leave out; None: nothing, and it is no base of others."""
        if not self._config.weight_sync.delta:
            return None
        latest = self._latest
        if latest is None or latest.setup is not self._connections.setup:
            return DeltaUpdate(number=self.num_updates)
        is_base = all(engine in latest.engines.engines for engine in engines.engines)
        return DeltaUpdate(number=self.num_updates, base=latest.number if is_base else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncedRun:
    """What the pushes of a run are accounted with, and what moves device memory for them."""

    memory: StepMemory
    phase: Phase
    totals: RunTotals
    """Receives the bytes of each push."""
    dedicated: AbstractSet[str]
    """Names of the auxiliary models with slots of their own, which need no room on engines' devices."""
    monitor: RunMonitor | None
    """Receives the policy version of each push; None: not monitored."""


class WeightSync:
    """The weights on the engines, and the memory that they share with the trainer.

    Engines serve the policy, unless `serve` names another model.

        sync = WeightSync.between(config, trainer, engines, pool)
        sync.push(0)  # all ready engines serve version 0
        sync.restore(1)  # engine 1 was restarted, and receives version 0 too
    """

    def __init__(
        self, connect: Callable[[str | None], ModelSync] | None, supervisor: EngineSupervisor | None = None
    ) -> None:
        """Connect the policy with the engines.

        Args:
            connect: connects a trained model, None: the policy. None: no engine receives weights, versions are counted.
            supervisor: restores the engines that it restarts with the weights of the last push.
        """
        self._connect, self._supervisor = connect, supervisor
        self._restores(None)  # not from the trainer of a run before
        self._models: dict[str | None, ModelSync] = {} if connect is None else {None: connect(None)}
        self._restores(self.restore)
        self._served: str | None = None
        self.run: SyncedRun | None = None
        """The run that pushes are accounted for in; None before it begins."""
        self.policy_version = -1
        """Version of the weights that the engines hold, or were pushed last; -1 before the first push."""
        self.metrics: Mapping[str, float] = {}
        """Metrics of the last push: seconds, bytes, buckets."""

    @classmethod
    def between(
        cls,
        config: RunConfig,
        trainer: TrainerGroup,
        engines: EngineGroup,
        pool: SlotPool,
        models: AuxiliaryModels | None = None,
    ) -> WeightSync:
        """Connect the ranks of the policy, on the slots of `pool`, with engines, which may serve `models` as well."""

        def connect(model: str | None) -> ModelSync:
            ranks = trainer if model is None else servable_model(config, models, model)
            return ModelSync(config, ranks, engines, pool)

        return cls(connect, engines.supervisor)

    @property
    def num_updates(self) -> int:
        """Number of pushes that have begun, those to restarted engines included."""
        return sum(model.num_updates for model in self._models.values())

    def push(self, policy_version: int) -> PushReport | None:
        """Push the policy's current weights to all ready engines, as `policy_version`; return None without engines.

        Raises:
            WeightSyncError: the weights did not arrive completely; the engines refuse to serve until a push succeeds.
            WorkerError: a trainer rank died, or an engine was lost that must not be restarted.
        """
        self._select(None)
        return self._push(policy_version)

    def serve(self, model: str | None) -> None:
        """Push the weights of a trained model, None: of the policy, if the engines hold another one's.

        Raises:
            ConfigError: engines cannot serve the model.
        """
        if self._select(model):
            self._push(self.policy_version)

    def restore(self, *replicas: int) -> Sequence[int]:
        """Push the current version to restarted engines, while the others continue to serve.

        Engines on slots of their own wait for the next push while another one serves: their ranks and the trainer's
        then connect once, with all of them.

        Returns:
            The replicas that serve from now on. One that was lost meanwhile is not among them: it will be restarted.

        Raises:
            MegarlError: as `push`.
            OutdatedEngineError: the trainer does not have this version any more.
        """
        if self.policy_version < 0:
            return replicas  # the first push will include these engines
        return self._models[self._served].restore(replicas, self.policy_version)

    def mark_outdated(self, model: str | None = None) -> None:
        """Note that a model, None: the policy, has newer weights than were pushed; no-op for one that was never."""
        if model in self._models:
            self._models[model].is_outdated = True

    def _select(self, model: str | None) -> bool:
        """Choose whose weights pushes send; return whether the engines hold those of another model."""
        if model == self._served or self._connect is None:
            return False
        self._models[self._served].release_engines()
        self._models[model] = self._models.get(model) or self._connect(model)
        self._served = model
        return True

    def _push(self, policy_version: int) -> PushReport | None:
        """Push the weights of the served model, and record the time and bytes of the sync."""
        run, report = self.run, None
        if self._connect is not None:
            if run is None:
                report = self._models[self._served].push(policy_version)
            else:
                run.memory.begin_push()
                with run.phase("weight_sync"):
                    report = self._models[self._served].push(policy_version)
                run.totals.weight_sync_bytes += report.bytes_moved
            self.metrics = report.metrics()
        self.policy_version = policy_version
        self._restores(self.restore)
        if run is not None and run.monitor is not None:
            run.monitor.heartbeat.pushed(policy_version)
        return report

    def _restores(self, restore: Callable[[*tuple[int, ...]], Sequence[int]] | None) -> None:
        """Let the supervisor call `restore` for engines that it has restarted."""
        if self._supervisor is not None:
            self._supervisor.restore = restore

    def begin_sampling(self) -> dict[str, float]:
        """Free device memory for the engines, as configured by `trainer.offload` and `rollout.engine`; return metrics.

        Engines that have released their weights for an update of another model receive the same version again.
        """
        memory = self._of_run.memory
        if memory.needs_push:
            self._push(self.policy_version)
        return memory.begin_sampling()

    def begin_scoring(self, model: str = "") -> None:
        """Free device memory for a forward pass of an auxiliary model, or of the policy."""
        if model not in self._of_run.dedicated:
            self._of_run.memory.begin_scoring()

    def begin_update(self, model: str = "") -> None:
        """Free device memory for an update of an auxiliary model, or for a save of the policy."""
        if model:
            self.mark_outdated(model)
        if model not in self._of_run.dedicated:
            self._of_run.memory.begin_update()

    def begin_training(self) -> None:
        """Free device memory for an update of the policy, after which the engines are outdated."""
        self.mark_outdated()
        self._of_run.memory.begin_training()

    @property
    def _of_run(self) -> SyncedRun:
        assert self.run is not None, "no run has begun"
        return self.run


def servable_model(config: RunConfig, models: AuxiliaryModels | None, name: str) -> TrainerGroup:
    """Return the ranks of a trained auxiliary model that engines can serve.

    Raises:
        ConfigError: they cannot.
    """
    kind, trained = config.algorithm.type, {} if models is None else models.trained
    if models is None or name not in trained:
        raise ConfigError(
            f"algorithm.type: {kind} lets engines serve the model {name!r}, which is none of the models that it "
            f"trains: {', '.join(sorted(trained)) or 'none'}"
        )
    if name in models.dedicated:
        raise ConfigError(
            f"placement.{name}: {kind} lets engines serve this model, which needs the slots of the policy then, "
            "got a pool of its own"
        )
    head = next(each.head for each in config.auxiliary_models if each.name == name)
    if head != "lm":
        raise ConfigError(
            f"algorithm.type: {kind} lets engines serve the model {name!r}, which needs to be a language model, "
            f"got one with the head {head!r}"
        )
    return trained[name]
