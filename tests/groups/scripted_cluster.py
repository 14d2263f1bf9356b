"""A scripted cluster for tests of weight sync: two trainer ranks and two engines, which answer calls in threads."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from megarl.config import RunConfig
from megarl.groups import sync_update
from megarl.groups.engine_group import EngineHandles, StartedEngine
from megarl.groups.weight_sync import WeightSync
from megarl.megatron.requests import PreparedSync, PushRequest, PushResult, SyncSetup
from megarl.placement.pool import Slot, SlotPool
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import WeightLayout, WeightNeeds
from megarl.reshard.planning.strategy import DeltaUpdate, SyncStats
from megarl.reshard.transfer.commit_decision import CommitDecision, TransferredBytes
from megarl.reshard.transfer.heartbeat import RankHeartbeat
from megarl.reshard.transfer.process_groups import TransferGroup
from megarl.reshard.transfer.transport import SyncActivity
from megarl.rollout.engine import EngineUpdate, UpdateReport
from megarl.workers import failures
from megarl.workers.group import RemoteCall
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS

TIMEOUT_SECONDS, ABORT_SECONDS = UNREACHED_SECONDS, 3 * HANG_SECONDS
"""Limits of a weight sync, which no test reaches: ranks would otherwise abort at a beat that comes at any time."""
NOTHING = WeightLayout({}, ())
NEEDS = WeightNeeds(layouts=(NOTHING,), full_tensors=())


def make_stats(sent: int, received: int, extra: int) -> SyncStats:
    num_bytes = {"bytes_sent": sent, "bytes_received": received, "bytes_delivered": received}
    return SyncStats(**num_bytes, buckets=2 if received else 0, peak_extra_bytes=extra)


@dataclass
class Ref:
    """A call that another thread answers."""

    answer: Any = None
    is_over: threading.Event = field(default_factory=threading.Event)

    def __hash__(self) -> int:
        return id(self)

    def resolve(self, answer: Any) -> None:
        self.answer = answer
        self.is_over.set()


@dataclass
class Cluster:
    """Trainer ranks 0 and 1, and two engines on their slots, or on slots of their own."""

    disaggregated: bool = False
    calls: list[Any] = field(default_factory=list)
    trainer_error: RayError | None = None
    engine_errors: dict[int, RayError] = field(default_factory=dict)
    """By replica, the error of its next update."""
    undelivered: tuple[str, ...] = ()
    deltas: list[DeltaUpdate | None] = field(default_factory=list)
    """Of the pushes so far."""
    engine_deltas: dict[int, DeltaUpdate | None] = field(default_factory=dict)
    """By replica, of its last update."""
    processes: Any = field(default_factory=itertools.count)
    heartbeats: list[RankHeartbeat] = field(default_factory=list)
    ready: list[int] = field(default_factory=lambda: [0, 1])
    engines: list[StartedEngine] = field(default_factory=list)
    config: Any = None

    def name(self, replica: int) -> str:
        return f"engine {replica}"

    def __post_init__(self) -> None:
        self.engines = [self.start(replica) for replica in range(2)]
        self.engine_slots = [(0,), (1,)]
        slots = tuple(Slot(i, 1.0, 0.0, "node", None) for i in range(2))
        self.pool = SlotPool(None, slots, "cpu")
        self.grid = RankGrid(dp=2)
        self.supervisor: Any = SimpleNamespace(
            wait_ready=lambda: self.ready, mark_serving=lambda _: None, attribute_failure=lambda _: False
        )
        self.offload_config = SimpleNamespace(is_enabled=False)

    def start(self, replica: int) -> StartedEngine:
        invoke = SimpleNamespace(remote=lambda *call: self.call_engine(replica, *call))
        return StartedEngine(SimpleNamespace(invoke=invoke, number=next(self.processes)), f"engine {replica}")

    def restart(self, replica: int) -> None:
        self.engines[replica] = self.start(replica)

    def select(self, replicas: list[int]) -> EngineHandles:
        chosen = [self.engines[replica] for replica in replicas]
        return EngineHandles(chosen, [self.engine_slots[replica] for replica in replicas], self.pool, HANG_SECONDS)

    def call_engine(self, replica: int, method: str, *arguments: Any) -> Ref:
        self.calls.append((method, replica))
        ref = Ref()
        if method == "update_weights":
            threading.Thread(target=self._update, args=(ref, replica, *arguments), daemon=True).start()
        elif method == "join_trainer":
            self.calls[-1] = (method, replica, arguments[2])
            ref.resolve(None)
        else:
            ref.resolve({"weight_needs": NEEDS, "weight_needs_digest": NEEDS.digest}.get(method))
        return ref

    def _update(self, ref: Ref, replica: int, update: EngineUpdate) -> None:
        assert update.begins
        assert update.receives
        self.engine_deltas[replica] = update.delta
        if replica in self.engine_errors:
            ref.resolve(self.engine_errors.pop(replica))
            return
        decision = CommitDecision(update.commit, update.commit.connect())
        decision.report_received(TransferredBytes(0, 3) if self.disaggregated else TransferredBytes())
        while (reason := decision.read()) is None:
            time.sleep(0.01)
        self.calls.append(("aborts" if reason else "serves", replica, update.policy_version))
        stats = (make_stats(0, 3, 3),) if self.disaggregated else ()
        ref.resolve(UpdateReport(stats=stats, open_seconds=0.0, commit_seconds=0.0))

    def prepare_sync(self, setup: SyncSetup) -> PreparedSync:
        self.calls.append("plan")
        if self.disaggregated:
            assert setup.transfer_spec is not None
            return PreparedSync(transfer_spec=replace(setup.transfer_spec, sources=[NOTHING] * 2))
        self.heartbeats += [
            RankHeartbeat(setup.heartbeat, rank, SyncActivity(), lambda reason: self.calls.append(f"aborted: {reason}"))  # type: ignore[arg-type]
            for rank in range(2)
        ]
        offers: dict[int, Any] = {rank: f"boxes of rank {rank}" for rank in setup.receivers}
        return PreparedSync(offers=offers)

    def begin_connect(self, transfer_group: TransferGroup) -> RemoteCall[None]:
        self.heartbeats += [
            RankHeartbeat(transfer_group.heartbeat, rank, SyncActivity(), lambda _: None) for rank in range(4)
        ]
        return self._trainer_call(None, self.trainer_error)

    def begin_push(self, request: PushRequest | None) -> RemoteCall[PushResult]:
        self.calls.append(f"push without {sorted(request.skipped)}" if request else "push")
        self.deltas.append(None if request is None else request.delta)
        stats = make_stats(3 * len(self.ready), 0, 7) if self.disaggregated else make_stats(1, 1, 3)
        return self._trainer_call(PushResult(stats=stats, undelivered=self.undelivered), self.trainer_error)

    def _trainer_call(self, result: Any, error: RayError | None) -> RemoteCall[Any]:
        ref = Ref()
        ref.resolve(error or result)
        return RemoteCall([ref], lambda results: results[0], "actor.push_weights", {ref: "actor rank 0"})


def fake_wait(refs: list[Ref], *, num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
    end = time.monotonic() + (HANG_SECONDS if timeout is None else timeout)
    while sum(ref.is_over.is_set() for ref in refs) < num_returns and time.monotonic() < end:
        time.sleep(0.005)
    done = [ref for ref in refs if ref.is_over.is_set()][:num_returns]
    return done, [ref for ref in refs if ref not in done]


def fake_get(refs: Any) -> Any:
    values = [ref.answer for ref in (refs if isinstance(refs, list) else [refs])]
    for value in values:
        if isinstance(value, RayError):
            raise value
    return values if isinstance(refs, list) else values[0]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make clusters, each with a `WeightSync` that has connected."""
    monkeypatch.setattr(ray, "wait", fake_wait)
    monkeypatch.setattr(ray, "get", fake_get)
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(failures, "ROOT_CAUSE_SECONDS", 0.1)
    monkeypatch.setattr(sync_update, "CAUSE_SECONDS", 0.1)
    monkeypatch.setattr(sync_update, "CLOSE_SECONDS", HANG_SECONDS)  # the threads of engines connect to the store first

    def make(*, disaggregated: bool = False, **weight_sync: Any) -> tuple[Cluster, WeightSync]:
        cluster: Any = Cluster(disaggregated)
        placement = {"pools": {"b": {"nodes": 1, "slots_per_node": 2}}, "rollout": {"pool": "b"}}
        config = RunConfig.model_validate(
            {
                "run_dir": "unused",
                "model": {"path": "unused"},
                "data": {"path": "unused"},
                "rollout": {"replicas": 2},
                "reward": {"terms": {"one": {"type": "format", "pattern": "1"}}},
                "weight_sync": {
                    "strategy": "exact",
                    "timeout_seconds": TIMEOUT_SECONDS,
                    "abort_seconds": ABORT_SECONDS,
                    **weight_sync,
                },
                "placement": {"nodes": 1, "slots_per_node": 2} | (placement if disaggregated else {}),
            }
        )
        clusters.append(cluster)
        cluster.config = config
        syncs.append(WeightSync(config, cluster, cluster, cluster.pool))
        return cluster, syncs[-1]

    clusters, syncs, others = list[Cluster](), list[WeightSync](), set(threading.enumerate())
    yield make
    for heartbeat in (heartbeat for cluster in clusters for heartbeat in cluster.heartbeats):
        heartbeat.close()
    for thread in set(threading.enumerate()) - others:
        if thread.name == "weight-sync-heartbeat":
            thread.join(HANG_SECONDS)
    syncs.clear()  # with the stores that heartbeats are written to
