"""Who connects when: at the start, after a failed push, and after the loss of an engine; with a scripted cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayError

from megarl.errors import LostWorkerError, OutdatedEngineError, WeightSyncError
from megarl.groups.weight_sync import WeightSync
from megarl.reshard.transfer.commit_decision import TransferredBytes
from megarl.reshard.transfer.process_groups import connect_group
from tests.groups.scripted_cluster import ABORT_SECONDS, TIMEOUT_SECONDS, Cluster, make, make_stats

__all__ = ["make"]


def failed(text: str) -> RayError:
    return ray.exceptions.RayTaskError("push", text, WeightSyncError(text))


def fail_push(cluster: Cluster, sync: WeightSync, version: int) -> None:
    """Push, and let a trainer rank report that a rank is silent."""
    cluster.trainer_error = failed("rank 0: round 3 of the weights: nothing from rank 1 within 5 s")
    with pytest.raises(WeightSyncError, match="nothing from rank 1"):
        sync.push(version)
    cluster.trainer_error = None


CONNECT = [("weight_needs", 0), ("weight_needs_digest", 1), "plan", ("prepare_boxes", 0), ("prepare_boxes", 1)]
UPDATES = [("update_weights", 0), ("update_weights", 1)]


def take(cluster: Cluster) -> list[Any]:
    """Return the calls since the last `take`; the threads of engines finish in any order."""
    calls, cluster.calls[:] = list(cluster.calls), []
    ends = [call for call in calls if call[0] in ("serves", "aborts")]
    return [call for call in calls if call not in ends] + sorted(ends)


def test_all_connect_once_and_a_push_is_one_call_of_each(make: Any) -> None:
    cluster, sync = make()
    assert take(cluster) == CONNECT
    for version in (0, 1):
        report = sync.push(version)
        assert report.bytes_moved == 1 + 1
        assert (report.delta_metrics(), cluster.deltas[-1]) == ({}, None)
        assert report.seconds.keys() == {"open", "transfer", "commit"}
        assert take(cluster) == [*UPDATES, "push", ("serves", 0, version), ("serves", 1, version)]


def test_lost_engine_connects_alone(make: Any) -> None:
    """The trainer ranks complete the push that it takes part in, and neither plan nor connect again."""
    cluster, sync = make()
    sync.push(0)
    take(cluster)
    cluster.engine_errors[1] = ActorDiedError()

    def attribute_failure(error: Exception) -> bool:
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
    sync.resync(1)
    assert take(cluster) == [
        *(("prepare_boxes", 1), ("update_weights", 1), "push without [0]"),
        ("serves", 1, 1),
    ]
    sync.push(2)
    assert take(cluster) == [*UPDATES, "push", ("serves", 0, 2), ("serves", 1, 2)]


def test_all_connect_again_after_the_trainer_has_failed(make: Any) -> None:
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


def test_boxes_that_were_not_delivered_fail_the_push(make: Any) -> None:
    cluster, sync = make()
    cluster.undelivered = ("engine 1 rank 0 did not copy its weights within 4 s",)
    with pytest.raises(WeightSyncError, match="engine 1 rank 0 did not copy"):
        sync.push(0)
    assert sync.policy_version == -1
    cluster.undelivered = ()
    take(cluster)
    sync.push(0)
    assert take(cluster)[:2] == [("prepare_boxes", 0), ("prepare_boxes", 1)]


def test_disaggregated_engines_receive_while_the_trainer_sends(make: Any) -> None:
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
    reason = group.heartbeat.open().get("abort").decode()  # what the ranks of both sides see
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


def test_bytes_that_do_not_add_up_are_not_served(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, sync = make(disaggregated=True)
    monkeypatch.setattr(TransferredBytes, "__init__", lambda self, *_: None)
    for name in ("bytes_sent", "bytes_received"):
        monkeypatch.setattr(TransferredBytes, name, 0)
    with pytest.raises(WeightSyncError, match="the ranks sent 6 bytes and received 0"):
        sync.push(0)
    assert not [call for call in take(cluster) if call[0] == "serves"]


def test_ranks_that_connect_do_not_wait_for_a_side_that_failed(make: Any) -> None:
    cluster, sync = make(disaggregated=True)
    cluster.restart(0)
    cluster.trainer_error = ActorDiedError()
    take(cluster)
    with pytest.raises(LostWorkerError):
        sync.push(0)
    (group,) = {call[2] for call in take(cluster) if call[0] == "join_trainer"}
    with pytest.raises(WeightSyncError, match=r"the connecting was aborted: .* rank 0 died"):
        connect_group(group, 0, "plan")


def test_resync_is_retried_if_another_engine_was_lost(make: Any) -> None:
    cluster, sync = make()
    sync.push(4)
    take(cluster)
    cluster.restart(0)
    cluster.supervisor.ready = [0, 1]
    cluster.trainer_error = failed("rank 1: lost")

    def attribute_failure(_: Exception) -> bool:
        cluster.supervisor.ready, cluster.trainer_error = [0], None
        return True

    cluster.supervisor.attribute_failure = attribute_failure
    sync.resync(0)
    assert [call for call in take(cluster) if call[0] in ("serves", "update_weights")] == [
        *[("update_weights", 0)] * 2,
        ("serves", 0, 4),
    ]
    sync.resync(1)  # the engine that was lost
    assert take(cluster) == []


def last_delta(cluster: Cluster, replicas: Sequence[int] = (0, 1)) -> tuple[int, int | None]:
    """Return number and base of the last push, which trainer ranks and engines have to agree about."""
    delta = cluster.deltas[-1]
    assert delta is not None
    assert {cluster.engine_deltas[replica] for replica in replicas} == {delta}
    return delta.number, delta.base


@pytest.mark.parametrize("disaggregated", [False, True])
def test_a_delta_builds_on_the_last_push_unless_that_failed(make: Any, disaggregated: bool) -> None:
    cluster, sync = make(disaggregated=disaggregated, delta=True)
    first = sync.push(0)
    assert last_delta(cluster) == (1, None)
    assert first.delta_metrics()["weight_sync/is_whole"] == 1.0
    assert sync.push(1).delta_metrics()["weight_sync/is_whole"] == 0.0
    assert last_delta(cluster) == (2, 1)
    fail_push(cluster, sync, 2)
    sync.push(2)
    assert last_delta(cluster) == (4, None)
    sync.push(3)
    assert last_delta(cluster) == (5, 4)
    cluster.undelivered = ("engine 1 rank 0 did not copy its weights within 4 s",)
    with pytest.raises(WeightSyncError, match="did not copy"):  # the trainer ranks stay connected
        sync.push(4)
    cluster.undelivered = ()
    sync.push(4)
    assert last_delta(cluster) == (7, None)


def test_a_restarted_engine_receives_all_weights_and_then_all_engines_do(make: Any) -> None:
    """The trainer ranks keep digests of the latest push only, in which the other engine has taken no part."""
    cluster, sync = make(delta=True)
    sync.push(0)
    sync.push(1)
    cluster.restart(1)
    cluster.supervisor.ready = [0, 1]
    sync.resync(1)
    assert last_delta(cluster, [1]) == (3, None)
    sync.push(2)
    assert last_delta(cluster) == (4, None)
    cluster.ready = [0]
    sync.push(3)
    assert last_delta(cluster, [0]) == (5, 4)  # a part of the engines of the base
    cluster.ready = [0, 1]
    sync.push(4)
    assert last_delta(cluster) == (6, None)


def test_new_connections_of_disaggregated_engines_have_no_base(make: Any) -> None:
    """All ranks connect again if the engines are others, and the trainer ranks make new plans."""
    cluster, sync = make(disaggregated=True, delta=True)
    sync.push(0)
    cluster.ready = [0]
    sync.push(1)
    assert last_delta(cluster, [0]) == (2, None)
    sync.push(2)
    assert last_delta(cluster, [0]) == (3, 2)


def test_a_restarted_engine_waits_for_weights_that_the_trainer_has_updated(make: Any) -> None:
    """The trainer has overwritten the version that the others serve."""
    cluster, sync = make()
    sync.push(0)
    sync.is_outdated = True
    take(cluster)
    with pytest.raises(OutdatedEngineError, match="was restarted and needs the next weights"):
        sync.resync(1)
    assert take(cluster) == []
    sync.push(1)
    cluster.supervisor.ready = [1]
    take(cluster)
    sync.resync(1)
    assert ("serves", 1, 1) in cluster.calls
