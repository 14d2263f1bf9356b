"""One push of the weights: a call of all trainer ranks and engines at the same time, and the decision about it.

controller                          trainer ranks                 engines
call ----------------------------->  push        boxes ------->    begin, receive
wait: all have sent                                                report "received" to the store
wait: all have received <----------------------------------------
bytes, weights compared; decide ------------------------------>    end: serve the weights, or abort

All weights of the engines are compared with the trainer's before they serve them (`weight_sums`):

sum_weights       trainer    sums of what each rank holds of the engines' weights
verify_weights    engines    comparison with those of their own parameters
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

from megarl.cluster.workers.group import RemoteCall, WorkerFuture
from megarl.config.rollout import WeightSyncConfig
from megarl.engines.engine import EngineUpdate, UpdateReport
from megarl.errors import MegarlError, WeightDifferenceError, WeightSyncError
from megarl.megatron.requests import PushRequest, PushResult, sum_sync_stats
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.planning.strategy import DeltaUpdate, SyncStats
from megarl.reshard.transfer.commit_decision import CommitDecision, CommitSpec, first_line
from megarl.reshard.transfer.heartbeat import SyncMonitor
from megarl.reshard.transfer.weight_sums import add_parts
from megarl.run.remote.engine_group import EngineHandles
from megarl.run.remote.trainer_group import TrainerGroup
from megarl.run.sync.sync_connections import REPORT_GRACE_SECONDS, SyncConnections
from megarl.tracking.phases import PhaseTimer


def verify_weights(
    trainer: TrainerGroup, engines: EngineHandles, layouts: Sequence[WeightLayout], policy_version: int
) -> None:
    """Compare all weights of every engine with the trainer's, within an update that has not ended.

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
        config: WeightSyncConfig,
        trainer: TrainerGroup,
        engines: EngineHandles,
        connections: SyncConnections,
        *,
        number: int,
        policy_version: int,
        delta: DeltaUpdate | None = None,
    ) -> None:
        """`number`: unique in the run; `delta`: that of the request, or None."""
        self._config, self._trainer, self._engines, self._connections = config, trainer, engines, connections
        self._policy_version, self._delta = policy_version, delta
        self._store = connections.store.latest
        host, port = connections.store.host, self._store.port
        self._spec = CommitSpec(host, port, f"update {number}", len(engines.engines))
        self._decision = CommitDecision(self._spec, self._store)
        self.breaks_trainer = False
        """Whether the trainer ranks have failed in their part, which breaks the connections between them."""

    def run(self, request: PushRequest | None) -> PushReport:
        """Push; if anything fails, the engines abort the update.

        Raises:
            WeightSyncError: the weights did not arrive completely.
            WorkerError: a trainer rank or an engine was lost.
        """
        timer, reason = PhaseTimer(), "the controller was interrupted"
        if self._connections.begins_first:
            with timer.phase("open"):
                self._engines.call("begin_weights")
        update = EngineUpdate(
            policy_version=self._policy_version,
            commit=self._spec,
            begins=not self._connections.begins_first,
            receives=self._connections.receives,
            delta=self._delta,
        )
        updating: RemoteCall[list[UpdateReport]] = self._engines.begin("update_weights", update)
        try:
            with timer.phase("transfer"):
                sent = self._send(request, updating)
                self._wait_received(sent, updating)
            self._check_bytes(sent)
            self._verify(timer)
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

    def _send(self, request: PushRequest | None, updating: RemoteCall[list[UpdateReport]]) -> PushResult:
        """Wait until all trainer ranks have sent the weights.

        If an engine fails meanwhile, trainer ranks whose connections do not depend on it are waited for as well.
        """
        heartbeat, failure = self._connections.heartbeat, None
        with nullcontext() if heartbeat is None else SyncMonitor(heartbeat, self._store):
            self.breaks_trainer = True
            pushing = self._trainer.begin_push(request)
            assert isinstance(pushing, RemoteCall), "engines need trainer ranks in worker processes"
            try:
                sent: PushResult = pushing.result_with(updating, self._config.timeout_seconds + REPORT_GRACE_SECONDS)
                self.breaks_trainer = False
            except MegarlError as error:
                self._decision.decide(first_line(error))
                self.breaks_trainer = not (self._connections.survives_engines and self._is_completed(pushing))
                if self.breaks_trainer:
                    raise
                failure = error  # raised outside of the monitor, which would abort the sync on the trainer ranks
        if failure is not None:
            raise failure
        return sent

    def _is_completed(self, pushing: WorkerFuture[PushResult]) -> bool:
        """Return whether the trainer ranks complete their part without the engine that has failed."""
        try:
            pushing.result(SETTLE_LIMITS * self._config.abort_seconds + REPORT_GRACE_SECONDS)
        except MegarlError:
            return False
        return True

    def _wait_received(self, sent: PushResult, updating: RemoteCall[list[UpdateReport]]) -> None:
        """Wait until all engines have received the weights; raises WeightSyncError if one has not."""
        if sent.undelivered:
            updating.raise_failure(CAUSE_SECONDS)
            raise WeightSyncError("; ".join(sent.undelivered))
        end = time.monotonic() + self._config.timeout_seconds
        while not self._decision.has_everyone_received():
            updating.raise_failure(POLL_SECONDS)
            if time.monotonic() > end:
                seconds = f"{self._config.timeout_seconds:g} s"
                raise WeightSyncError(f"some engines have not received all weights {seconds} after they were sent")

    def _check_bytes(self, sent: PushResult) -> None:
        at_engines = self._decision.transferred()
        num_sent = sent.stats.bytes_sent + at_engines.bytes_sent
        num_received = sent.stats.bytes_received + at_engines.bytes_received
        if num_sent != num_received:
            raise WeightSyncError(f"the ranks sent {num_sent} bytes and received {num_received}")

    def _verify(self, timer: PhaseTimer) -> None:
        verify = self._config.verify
        if verify is not None and self._policy_version % verify.every == 0:
            with timer.phase("verify"):
                verify_weights(self._trainer, self._engines, self._connections.engine_layouts, self._policy_version)

    def _report(self, sent: PushResult, reports: Sequence[UpdateReport], seconds: Mapping[str, float]) -> PushReport:
        stats = sum_sync_stats([sent.stats, *chain.from_iterable(report.stats for report in reports)])
        opening = max(report.open_seconds for report in reports)  # during `transfer`, unless it was a call of its own
        phases = {"open": opening} | dict(seconds)
        if "open" not in seconds:
            phases["transfer"] = max(0.0, phases["transfer"] - opening)
        moved, saved = stats.bytes_received, stats.bytes_not_received
        if not any(report.stats for report in reports):  # the trainer ranks deliver what they have received
            moved, saved = moved + stats.bytes_delivered, saved + stats.bytes_not_delivered
        return PushReport(stats=stats, seconds=phases, bytes_moved=moved, bytes_saved=saved, delta=self._delta)
