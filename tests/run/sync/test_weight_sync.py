"""Weight sync: who connects when, several models, and verification; two trainer ranks and two engines in threads."""

import itertools
import threading
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, RayError

from megarl.cluster.placement.pool import Slot, SlotPool
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers import failures
from megarl.cluster.workers.group import RemoteCall
from megarl.engines.engine import UpdateReport
from megarl.errors import ConfigError, LostWorkerError, OutdatedEngineError, WeightDifferenceError, WeightSyncError
from megarl.megatron.requests import PreparedSync, PushResult
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, WeightNeeds, slices
from megarl.reshard.planning.strategy import DeltaUpdate, SyncStats
from megarl.reshard.transfer.commit_decision import CommitDecision, TransferredBytes
from megarl.reshard.transfer.heartbeat import RankHeartbeat, SyncActivity
from megarl.reshard.transfer.process_groups import connect_group
from megarl.reshard.transfer.weight_sums import PartTable, sum_box
from megarl.run.remote.engine_group import EngineHandles, StartedEngine
from megarl.run.sync import weight_sync as weight_sync_module
from megarl.run.sync.weight_sync import WeightSync, verify_weights
from tests.errors import expect_error
from tests.run.finished_groups import run_config
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_until

TIMEOUT_SECONDS, ABORT_SECONDS = UNREACHED_SECONDS, 3 * HANG_SECONDS
"""Limits of a weight sync, which no test reaches: ranks would otherwise abort at a beat that comes at any time."""
NOTHING = WeightLayout({}, ())
NEEDS = WeightNeeds(layouts=(NOTHING,), full_tensors=())


def make_stats(sent, received, extra):
    num_bytes = {"bytes_sent": sent, "bytes_received": received, "bytes_delivered": received}
    return SyncStats(**num_bytes, buckets=2 if received else 0, peak_extra_bytes=extra)


@dataclass(eq=False)
class Ref:
    """A call that another thread answers."""

    answer: Any = None
    is_over: threading.Event = field(default_factory=threading.Event)

    def resolve(self, answer):
        self.answer = answer
        self.is_over.set()


@dataclass
class Cluster:
    """Trainer ranks 0 and 1, and two engines on their slots, or on slots of their own."""

    disaggregated: bool = False
    calls: list[Any] = field(default_factory=list)
    trainer_error: RayError | None = None
    engine_errors: dict[int, RayError] = field(default_factory=dict)  # by replica, the error of its next update
    undelivered: tuple[str, ...] = ()
    deltas: list[DeltaUpdate | None] = field(default_factory=list)  # of the pushes so far
    engine_deltas: dict[int, DeltaUpdate | None] = field(default_factory=dict)  # by replica, of its last update
    processes: Any = field(default_factory=itertools.count)
    heartbeats: list[RankHeartbeat] = field(default_factory=list)
    ready: list[int] = field(default_factory=lambda: [0, 1])
    engines: list[StartedEngine] = field(default_factory=list)
    config: Any = None

    def name(self, replica):
        return f"engine {replica}"

    def __post_init__(self):
        self.engines = [self.start(replica) for replica in range(2)]
        self.engine_slots = [(0,), (1,)]
        slots = tuple(Slot(i, 1.0, 0.0, "node", None) for i in range(2))
        self.pool = SlotPool(None, slots, "cpu")
        self.grid = RankGrid(dp=2)
        self.supervisor = SimpleNamespace(
            wait_ready=lambda: self.ready,
            mark_serving=lambda _: None,
            attribute_failure=lambda _: False,
            serving=(),
        )
        self.offload_config = SimpleNamespace(is_enabled=False)

    def start(self, replica):
        invoke = SimpleNamespace(remote=lambda *call: self.call_engine(replica, *call))
        return StartedEngine(SimpleNamespace(invoke=invoke, number=next(self.processes)), f"engine {replica}")

    def restart(self, replica):
        self.engines[replica] = self.start(replica)

    def select(self, replicas):
        chosen = [self.engines[replica] for replica in replicas]
        return EngineHandles(chosen, [self.engine_slots[replica] for replica in replicas], self.pool, HANG_SECONDS)

    def call_engine(self, replica, method, *arguments):
        self.calls.append((method, replica))
        ref = Ref()
        if method == "update_weights":
            threading.Thread(target=self._update, args=(ref, replica, *arguments), daemon=True).start()
            return ref
        if method == "join_trainer":
            self.calls[-1] = (method, replica, arguments[2])
        ref.resolve({"weight_needs": NEEDS, "weight_needs_digest": NEEDS.digest}.get(method))
        return ref

    def _update(self, ref, replica, update):
        assert update.receives
        self.engine_deltas[replica] = update.delta
        if replica in self.engine_errors:
            ref.resolve(self.engine_errors.pop(replica))
            return
        decision = CommitDecision(update.commit, update.commit.connect())
        decision.report_received(TransferredBytes(0, 3) if self.disaggregated else TransferredBytes())
        assert wait_until(lambda: decision.read() is not None)
        reason = decision.read()
        self.calls.append(("aborts" if reason else "serves", replica, update.policy_version))
        stats = (make_stats(0, 3, 3),) if self.disaggregated else ()
        ref.resolve(UpdateReport(stats=stats, open_seconds=0.0, commit_seconds=0.0))

    def prepare_sync(self, setup):
        self.calls.append("plan")
        if self.disaggregated:
            assert setup.transfer_spec is not None
            return PreparedSync(transfer_spec=replace(setup.transfer_spec, sources=[NOTHING] * 2))
        self._start_heartbeats(setup.heartbeat, 2)
        offers = {rank: f"boxes of rank {rank}" for rank in setup.receivers}
        return PreparedSync(offers=offers)

    def begin_connect(self, transfer_group):
        self._start_heartbeats(transfer_group, 4)
        return self._trainer_call(None)

    def _start_heartbeats(self, spec, num_ranks):
        self.heartbeats += [RankHeartbeat(spec, rank, SyncActivity(), self._abort) for rank in range(num_ranks)]

    def _abort(self, reason):
        if not self.disaggregated:
            self.calls.append(f"aborted: {reason}")

    def begin_push(self, request):
        self.calls.append(f"push without {sorted(request.skipped)}" if request else "push")
        self.deltas.append(None if request is None else request.delta)
        stats = make_stats(3 * len(self.ready), 0, 7) if self.disaggregated else make_stats(1, 1, 3)
        return self._trainer_call(PushResult(stats=stats, undelivered=self.undelivered))

    def _trainer_call(self, result):
        ref = Ref()
        ref.resolve(self.trainer_error or result)
        return RemoteCall([ref], lambda results: results[0], "actor.push_weights", {ref: "actor rank 0"})


def fake_wait(refs, *, num_returns=1, timeout=None):
    seconds = HANG_SECONDS if timeout is None else timeout
    wait_until(lambda: sum(ref.is_over.is_set() for ref in refs) >= num_returns, seconds)
    done = [ref for ref in refs if ref.is_over.is_set()][:num_returns]
    return done, [ref for ref in refs if ref not in done]


def fake_get(refs):
    values = [ref.answer for ref in (refs if isinstance(refs, list) else [refs])]
    for value in values:
        if isinstance(value, RayError):
            raise value
    return values if isinstance(refs, list) else values[0]


@pytest.fixture
def make(monkeypatch):
    """Make clusters, each with a `WeightSync` that has connected."""
    monkeypatch.setattr(ray, "wait", fake_wait)
    monkeypatch.setattr(ray, "get", fake_get)
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(failures, "ROOT_CAUSE_SECONDS", 0.1)
    monkeypatch.setattr(weight_sync_module, "CAUSE_SECONDS", 0.1)
    # the threads of engines connect to the store first
    monkeypatch.setattr(weight_sync_module, "CLOSE_SECONDS", HANG_SECONDS)

    def make(*, disaggregated=False, **weight_sync):
        cluster = Cluster(disaggregated)
        pool = {"pools": {"b": {"nodes": 1, "slots_per_node": 2}}, "rollout": {"pool": "b"}}
        limits = {"timeout_seconds": TIMEOUT_SECONDS, "abort_seconds": ABORT_SECONDS}
        cluster.config = run_config(
            {"type": "grpo"},
            rollout={"replicas": 2},
            weight_sync={"strategy": "exact", "verify": None, **limits, **weight_sync},
            placement={"nodes": 1, "slots_per_node": 2} | (pool if disaggregated else {}),
        )
        clusters.append(cluster)
        syncs.append(WeightSync.between(cluster.config, cluster, cluster, cluster.pool))
        return cluster, syncs[-1]

    clusters, syncs, others = [], [], set(threading.enumerate())
    yield make
    for heartbeat in (heartbeat for cluster in clusters for heartbeat in cluster.heartbeats):
        heartbeat.close()
    for thread in set(threading.enumerate()) - others:
        if thread.name == "weight-sync-heartbeat":
            thread.join(HANG_SECONDS)
    syncs.clear()  # with the stores that heartbeats are written to


def failed(text):
    return ray.exceptions.RayTaskError("push", text, WeightSyncError(text))


def fail_push(cluster, sync, version):
    """Push, and let a trainer rank report that a rank is silent."""
    cluster.trainer_error = failed("rank 0: round 3 of the weights: nothing from rank 1 within 5 s")
    with expect_error(WeightSyncError, "1", "nothing"):
        sync.push(version)
    cluster.trainer_error = None


CONNECT = [("weight_needs", 0), ("weight_needs_digest", 1), "plan", ("prepare_boxes", 0), ("prepare_boxes", 1)]
UPDATES = [("update_weights", 0), ("update_weights", 1)]


def take(cluster):
    """Return the calls since the last `take`; the threads of engines finish in any order."""
    calls, cluster.calls[:] = list(cluster.calls), []
    ends = [call for call in calls if call[0] in ("serves", "aborts")]
    return [call for call in calls if call not in ends] + sorted(ends)


def test_all_connect_once_and_a_push_is_one_call_of_each(make):
    cluster, sync = make()
    assert take(cluster) == CONNECT
    for version in (0, 1):
        report = sync.push(version)
        assert report.bytes_moved == 1 + 1
        assert ("weight_sync/is_full" in report.metrics(), cluster.deltas[-1]) == (False, None)
        assert report.seconds.keys() == {"open", "transfer", "commit"}
        assert take(cluster) == [*UPDATES, "push", ("serves", 0, version), ("serves", 1, version)]


def test_lost_engine_connects_alone(make):
    """The trainer ranks complete the push that it takes part in, and neither plan nor connect again."""
    cluster, sync = make()
    sync.push(0)
    take(cluster)
    cluster.engine_errors[1] = ActorDiedError()

    def attribute_failure(error):
        assert "engine 1" in str(error)
        cluster.ready = [0]
        return True

    cluster.supervisor.attribute_failure = attribute_failure
    sync.push(1)
    assert take(cluster) == [
        *UPDATES,
        "push",
        *(("prepare_boxes", 0), ("update_weights", 0), "push without [1]"),
        *(("aborts", 0, 1), ("serves", 0, 1)),
    ]
    cluster.restart(1)
    cluster.ready = [0, 1]
    cluster.supervisor.ready = [0, 1]
    sync.restore(1)
    assert take(cluster) == [*(("prepare_boxes", 1), ("update_weights", 1), "push without [0]"), ("serves", 1, 1)]
    sync.push(2)
    assert take(cluster) == [*UPDATES, "push", ("serves", 0, 2), ("serves", 1, 2)]


def test_all_connect_again_after_the_trainer_has_failed(make):
    cluster, sync = make()
    sync.push(0)
    take(cluster)
    fail_push(cluster, sync, 1)
    assert sync.policy_version == 0
    calls = take(cluster)
    assert calls[:3] == [*UPDATES, "push"]
    assert [call for call in calls if call[0] == "aborts"] == [("aborts", 0, 1), ("aborts", 1, 1)]
    sync.push(1)
    assert take(cluster)[: len(CONNECT)] == CONNECT


def test_boxes_that_were_not_delivered_fail_the_push(make):
    cluster, sync = make()
    cluster.undelivered = ("engine 1 rank 0 did not copy its weights within 4 s",)
    with expect_error(WeightSyncError, "1", "0", "engine"):
        sync.push(0)
    assert sync.policy_version == -1
    cluster.undelivered = ()
    take(cluster)
    sync.push(0)
    assert take(cluster)[:2] == [("prepare_boxes", 0), ("prepare_boxes", 1)]


def test_disaggregated_engines_receive_while_the_trainer_sends(make):
    cluster, sync = make(disaggregated=True)
    *calls, first, second = take(cluster)
    assert calls == CONNECT[:3]
    group = first[2]
    assert (first[:2], second) == (("join_trainer", 0), ("join_trainer", 1, group))
    assert (group.name, group.size) == ("weights", 4)
    assert (group.timeout_seconds, group.abort_seconds) == (TIMEOUT_SECONDS, ABORT_SECONDS)
    report = sync.push(0)
    assert report.stats == make_stats(6, 6, 7)
    assert report.bytes_moved == 6
    take(cluster)
    cluster.trainer_error = failed("rank 0: round 3 of the weights: nothing from rank 2 within 9 s")
    message = r"nothing from rank 2 within 9 s \(ranks up to 1 .*, those of engine i begin at 2 \+ 1 \* i\)"
    with pytest.raises(WeightSyncError, match=message):
        sync.push(1)
    reason = group.open().get("abort").decode()  # what the ranks of both sides see
    assert reason.startswith("rank 0: round 3 of the weights: nothing from rank 2 within 9 s")
    cluster.trainer_error = None
    take(cluster)
    sync.push(1)
    calls = take(cluster)
    assert calls[:3] == CONNECT[:3]
    again = calls[3][2]
    assert again.port != group.port
    assert replace(again, port=group.port) == group
    assert calls[5:] == [*UPDATES, "push", ("serves", 0, 1), ("serves", 1, 1)]


def test_bytes_that_do_not_add_up_are_not_served(make, monkeypatch):
    cluster, sync = make(disaggregated=True)
    monkeypatch.setattr(TransferredBytes, "__init__", lambda self, *_: None)
    for name in ("bytes_sent", "bytes_received"):
        monkeypatch.setattr(TransferredBytes, name, 0)
    with expect_error(WeightSyncError, "6", "0", "received", "ranks"):
        sync.push(0)
    assert not [call for call in take(cluster) if call[0] == "serves"]


def test_ranks_that_connect_do_not_wait_for_a_side_that_failed(make):
    cluster, sync = make(disaggregated=True)
    cluster.restart(0)
    cluster.trainer_error = ActorDiedError()
    take(cluster)
    with pytest.raises(LostWorkerError):
        sync.push(0)
    (group,) = {call[2] for call in take(cluster) if call[0] == "join_trainer"}
    with expect_error(WeightSyncError, "0", "connecting", "aborted"):
        connect_group(group, 0, "plan")


def test_restore_is_retried_if_another_engine_was_lost(make):
    cluster, sync = make()
    sync.push(4)
    take(cluster)
    cluster.restart(0)
    cluster.supervisor.ready = [0, 1]
    cluster.trainer_error = failed("rank 1: lost")

    def attribute_failure(_):
        cluster.supervisor.ready, cluster.trainer_error = [0], None
        return True

    cluster.supervisor.attribute_failure = attribute_failure
    sync.restore(0)
    calls = [call for call in take(cluster) if call[0] in ("serves", "update_weights")]
    assert calls == [*[("update_weights", 0)] * 2, ("serves", 0, 4)]
    sync.restore(1)  # the engine that was lost
    assert take(cluster) == []


def test_restarted_disaggregated_engine_waits_for_the_next_push_if_another_one_serves(make):
    """Its ranks and those of all others then connect once."""
    cluster, sync = make(disaggregated=True)
    sync.push(4)
    take(cluster)
    cluster.restart(1)
    cluster.supervisor.ready, cluster.supervisor.serving = [0, 1], [0]
    assert sync.restore(1) == ()
    assert take(cluster) == []
    sync.push(5)
    calls = take(cluster)
    assert [call for call in calls if call == "plan"] == ["plan"]
    assert [call[:2] for call in calls if call[0] == "join_trainer"] == [("join_trainer", 0), ("join_trainer", 1)]
    assert [call for call in calls if call[0] == "serves"] == [("serves", 0, 5), ("serves", 1, 5)]
    cluster.restart(0)
    cluster.restart(1)
    cluster.supervisor.serving = []
    assert sync.restore(0, 1) == [0, 1]


def test_engines_that_restarted_together_receive_one_push(make):
    cluster, sync = make()
    sync.push(4)
    take(cluster)
    for replica in (0, 1):
        cluster.restart(replica)
    cluster.supervisor.ready = [0, 1]
    sync.restore(0, 1)
    calls = take(cluster)
    assert [call for call in calls if call[0] == "serves"] == [("serves", 0, 4), ("serves", 1, 4)]
    assert len([call for call in calls if isinstance(call, str) and call.startswith("push")]) == 1
    sync.mark_outdated()
    with expect_error(OutdatedEngineError, "restarted", "weights"):
        sync.restore(0, 1)


def last_delta(cluster, replicas=(0, 1)):
    """Return number and base of the last push, which trainer ranks and engines have to agree about."""
    delta = cluster.deltas[-1]
    assert delta is not None
    assert {cluster.engine_deltas[replica] for replica in replicas} == {delta}
    return delta.number, delta.base


@pytest.mark.parametrize("disaggregated", [False, True])
def test_a_delta_builds_on_the_last_push_unless_that_failed(make, disaggregated):
    cluster, sync = make(disaggregated=disaggregated, delta=True)
    first = sync.push(0)
    assert last_delta(cluster) == (1, None)
    assert first.metrics()["weight_sync/is_full"] == 1.0
    assert sync.push(1).metrics()["weight_sync/is_full"] == 0.0
    assert last_delta(cluster) == (2, 1)
    fail_push(cluster, sync, 2)
    sync.push(2)
    assert last_delta(cluster) == (4, None)
    sync.push(3)
    assert last_delta(cluster) == (5, 4)
    cluster.undelivered = ("engine 1 rank 0 did not copy its weights within 4 s",)
    with expect_error(WeightSyncError, "copy"):  # the trainer ranks stay connected
        sync.push(4)
    cluster.undelivered = ()
    sync.push(4)
    assert last_delta(cluster) == (7, None)


def test_all_weights_are_sent_again_if_engines_differ_after_a_delta(make, monkeypatch, capsys):
    cluster, sync = make(delta=True, verify={"every": 1})
    differs = iter([None, "engine 1: TP rank 0 does not hold w", None, None, "engine 0: TP rank 1 does not hold v"])

    def compare(*_):
        if (problem := next(differs)) is not None:
            raise WeightDifferenceError(problem)

    monkeypatch.setattr(weight_sync_module, "verify_weights", compare)
    sync.push(0)
    assert sync.push(1).metrics()["weight_sync/is_full"] == 1.0
    assert last_delta(cluster) == (3, None)
    assert [delta.base for delta in cluster.deltas] == [None, 1, None]
    assert sync.policy_version == 1
    assert capsys.readouterr().err == "engine 1: TP rank 0 does not hold w; all weights are sent again\n"
    assert sync.push(2).metrics()["weight_sync/is_full"] == 0.0
    assert ("serves", 1, 1) in cluster.calls
    assert cluster.calls.count(("aborts", 1, 1)) == 1
    fail_push(cluster, sync, 3)
    with expect_error(WeightDifferenceError, "v"):  # after a full sync, too: the run ends
        sync.push(3)


def test_a_restarted_engine_receives_all_weights_and_then_all_engines_do(make):
    """The trainer ranks keep copies of the latest push only, in which the other engine has taken no part."""
    cluster, sync = make(delta=True)
    sync.push(0)
    sync.push(1)
    cluster.restart(1)
    cluster.supervisor.ready = [0, 1]
    sync.restore(1)
    assert last_delta(cluster, [1]) == (3, None)
    sync.push(2)
    assert last_delta(cluster) == (4, None)
    cluster.ready = [0]
    sync.push(3)
    assert last_delta(cluster, [0]) == (5, 4)  # a part of the engines of the base
    cluster.ready = [0, 1]
    sync.push(4)
    assert last_delta(cluster) == (6, None)


def test_new_connections_of_disaggregated_engines_have_no_base(make):
    """All ranks connect again if the engines are others, and the trainer ranks make new plans."""
    cluster, sync = make(disaggregated=True, delta=True)
    sync.push(0)
    cluster.ready = [0]
    sync.push(1)
    assert last_delta(cluster, [0]) == (2, None)
    sync.push(2)
    assert last_delta(cluster, [0]) == (3, 2)


def test_a_restarted_engine_waits_for_weights_that_the_trainer_has_updated(make):
    """The trainer has overwritten the version that the others serve."""
    cluster, sync = make()
    sync.push(0)
    sync.mark_outdated()
    take(cluster)
    with expect_error(OutdatedEngineError, "restarted", "weights"):
        sync.restore(1)
    assert take(cluster) == []
    sync.push(1)
    cluster.supervisor.ready = [1]
    take(cluster)
    sync.restore(1)
    assert ("serves", 1, 1) in cluster.calls


def served_by(cluster, trained, *, dedicated=frozenset()):
    """Return the weights of the engines of `cluster`, whose ranks hold the policy and the trained models."""
    config = SimpleNamespace(
        **{name: getattr(cluster.config, name) for name in ("weight_sync", "rollout", "disaggregated")},
        algorithm=SimpleNamespace(type="duel"),
        auxiliary_models=[SimpleNamespace(name=name, head=group.head) for name, group in trained.items()],
    )
    models = SimpleNamespace(trained=trained, dedicated=dedicated)
    engines = cluster
    return WeightSync.between(config, engines, engines, cluster.pool, models)


class Other(Cluster):
    """The ranks of another model, which record their calls under their own name."""

    head = "lm"

    def begin_push(self, request):
        found = super().begin_push(request)
        self.calls[-1] = f"other {self.calls[-1]}"
        return found


def make_weights(make, **weight_sync):
    cluster, _ = make(**weight_sync)
    other = Other()
    other.calls, other.heartbeats = cluster.calls, cluster.heartbeats
    weights = served_by(cluster, {"proposer": other})
    cluster.calls.clear()
    return cluster, weights


def pushes(cluster):
    """Return the pushes and preparations of engine 0, in order."""
    kept = [call for call in cluster.calls if isinstance(call, str) or (call[0] == "prepare_boxes" and call[1] == 0)]
    return [call if isinstance(call, str) else call[0] for call in kept]


def test_engines_prepare_again_whenever_another_model_is_pushed(make):
    cluster, weights = make_weights(make)
    weights.push(0)
    assert pushes(cluster) == ["push"], "the policy was connected before"
    weights.serve("proposer")
    weights.serve("proposer")
    weights.push(1)
    weights.push(2)
    weights.serve("proposer")
    expected = ["push", "plan", "prepare_boxes", "other push", "prepare_boxes", "push", "push", "prepare_boxes"]
    assert pushes(cluster) == [*expected, "other push"], "the ranks of each model plan once"


def test_a_push_after_another_models_sends_all_weights(make):
    cluster, weights = make_weights(make, delta=True)
    weights.push(0)
    weights.push(1)
    assert [delta.base is None for delta in cluster.deltas if delta] == [True, False]
    weights.serve("proposer")
    weights.push(2)
    assert cluster.deltas[-1] is not None
    assert cluster.deltas[-1].base is None


def test_a_restarted_engine_receives_the_model_that_was_pushed_last(make):
    cluster, weights = make_weights(make)
    weights.push(3)
    weights.serve("proposer")
    assert weights.policy_version == 3
    cluster.supervisor.ready = cluster.ready
    cluster.restart(1)
    cluster.calls.clear()
    cluster.supervisor.restore(1)
    assert [call for call in cluster.calls if isinstance(call, str)] == ["other push without [0]"]


@pytest.mark.parametrize(
    ("head", "dedicated", "model", "message"),
    [
        ("lm", frozenset(), "judge", "serve the model 'judge', which is none of the models that it trains"),
        ("value", frozenset(), "critic", "needs to be a language model, got one with the head 'value'"),
        ("lm", frozenset({"critic"}), "critic", r"placement.critic: .* needs the slots of the policy then, got a pool"),
    ],
)
def test_models_that_engines_cannot_serve_are_refused(make, head, dedicated, model, message):
    cluster, _ = make()
    critic = Other()
    critic.head = head
    with pytest.raises(ConfigError, match=message):
        served_by(cluster, {"critic": critic}, dedicated=dedicated).serve(model)


def layout_of(first, last):
    box = ((first, last),)
    return WeightLayout({"w": TensorSpec((4,), "float32")}, (ShardPiece("w", box, "w", ((0, last - first),)),))


class Trainer:
    """Two ranks that hold a half of the weights each."""

    def sum_weights(self):
        return [
            PartTable(layout_of(first, first + 2), ENGINE).sum({"w": torch.arange(float(first), first + 2)})
            for first in (0, 2)
        ]


ENGINE = [layout_of(0, 3), layout_of(3, 4)]


class Engines:
    """Two engines of two ranks, of which the second may have a problem."""

    def __init__(self, problem=None):
        self.engines = [SimpleNamespace(name="engine 0"), SimpleNamespace(name="engine 1")]
        self._problem = problem

    def call(self, method, expected):
        assert method == "verify_weights"
        for layout, sums in zip(ENGINE, expected, strict=True):
            (piece,) = layout.pieces
            assert sums.tolist() == [int(sum_box(torch.arange(4.0)[slices(piece.box)], piece.box))]
        return [None, self._problem]


def verify(engines):
    verify_weights(Trainer(), engines, ENGINE, 8)


def test_engines_compare_what_all_trainer_ranks_hold_and_errors_name_the_engine():
    verify(Engines())
    with expect_error(WeightSyncError, "8", "1", "TP", "version", "engine"):
        verify(Engines("TP rank 1 does not hold w"))


def test_every_second_version_is_compared_before_it_is_served(make, monkeypatch):
    cluster, sync = make(verify={"every": 2})
    compared = []

    def compare(trainer, engines, layouts, policy_version):
        assert (trainer, len(engines.engines)) == (cluster, 2)
        assert layouts
        assert ("serves", 0, policy_version) not in cluster.calls
        compared.append(policy_version)
        if policy_version == 4:
            raise WeightSyncError("engine 0: TP rank 0 does not hold w")

    monkeypatch.setattr(weight_sync_module, "verify_weights", compare)
    phases = [set(sync.push(version).seconds) for version in range(4)]
    assert compared == [0, 2]
    assert phases == [{"open", "transfer", "verify", "commit"}, {"open", "transfer", "commit"}] * 2
    with expect_error(WeightSyncError, "does", "hold"):
        sync.push(4)
    assert [call for call in cluster.calls if call[0] == "aborts"]
    assert ("serves", 0, 4) not in cluster.calls
    assert sync.policy_version == 3
