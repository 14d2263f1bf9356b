"""Rollout workers that die or hang: restarts, and what is sampled, estimated and written again; scripted workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorUnschedulableError

from megarl.algorithms.grpo import group_estimates
from megarl.errors import RestartLimitError, WorkerError
from megarl.groups import rollout_workers
from megarl.groups.estimation.estimate_job import TOKENS_PER_WORKER, EstimateJob, EstimateSummary
from megarl.groups.group_stream import FinishedGroup
from megarl.workers.payload import StoredItem
from tests.groups.scripted_workers import FakeRay, FakeWorker, finish, ray, start_group

__all__ = ["ray"]


def test_number_of_replayed_groups_is_reported(ray: FakeRay) -> None:
    run = start_group(ray, workers=1)

    def answer() -> None:
        finish(ray.workers[0], "step-3-0", "step-3-2", "step-3-3", replayed=True)
        finish(ray.workers[0], "step-3-1")

    ray.before_waiting = answer
    assert sorted(group.summary.group_id for group in run.stream()) == [0, 1, 2, 3]
    assert run.messages == ["step-3: replayed 3 of 4 groups from the journal"]
    assert not ray.cancelled()
    run.messages.clear()
    ray.before_waiting = ray.finish_all
    list(run.stream())
    assert run.messages == []


def test_hung_worker_is_replaced_and_its_groups_are_resubmitted(ray: FakeRay) -> None:
    run = start_group(ray, engine_stall_seconds=20)
    first, second = ray.workers
    second.is_responsive, started_at = False, ray.now

    ray.before_waiting = lambda: len(ray.workers) == 3 and ray.finish_all()
    assert sorted(group.summary.group_id for group in run.stream()) == [0, 1, 2, 3]
    assert 20 < ray.now - started_at < 35
    assert set(ray.killed) == {second}
    assert len(first.pings) >= 3
    assert run.messages[0] == (
        "rollout worker 1 has not answered a ping for 20 s (recovery.engine_stall_seconds); killing it"
    )
    assert run.messages[1].startswith("rollout worker 1 was lost (")


def test_busy_worker_is_not_killed(ray: FakeRay) -> None:
    run = start_group(ray, engine_stall_seconds=20)
    started_at = ray.now

    ray.before_waiting = lambda: ray.now > started_at + 300 and ray.finish_all()
    assert len(list(run.stream())) == 4
    assert (ray.killed, run.messages) == ([], [])


def test_worker_that_hangs_while_writing_rollouts_is_replaced(ray: FakeRay) -> None:
    run = start_group(ray, workers=1, engine_stall_seconds=20)
    ray.workers[0].is_responsive = False
    run.group.record(3, [], [])

    def advance() -> None:
        if len(ray.workers) == 2 and "record" in ray.workers[1].calls:
            ray.workers[1].calls["record"].end(None)

    ray.before_waiting = advance
    run.group.flush_records()
    assert ray.killed[0] is ray.workers[0]
    assert run.messages[-1].startswith("rollout worker 0 was lost (")


def test_workers_share_an_estimate_and_that_of_a_dead_one_is_repeated(ray: FakeRay) -> None:
    run = start_group(ray)
    summary: Any = None  # an estimate reads references only
    groups = [FinishedGroup(summary, StoredItem(f"object {n}", 0), worker=n % 2) for n in range(3)]
    job = EstimateJob(
        estimator=group_estimates,
        arguments=(),
        keys_S=np.array([(0, 0), (1, 0), (1, 1), (2, 0)]),
        groups_N=np.array([0, 1, 1, 2]),
        rewards_N=np.zeros(4),
        scalars={},
        columns={},
        outputs=("advantages",),
        num_tokens=2 * TOKENS_PER_WORKER,
    )

    def answer(worker: FakeWorker, values: list[float]) -> None:
        if not worker.calls["estimate"].is_done:
            _, own, *_ = worker.arguments["estimate"]
            scalars = {"advantages": np.array(values)}
            worker.calls["estimate"].end(EstimateSummary(groups_N=own.groups_N, scalars=scalars, metrics={}))

    def advance() -> None:
        if len(ray.workers) == 2:
            ray.workers[1].die()
        answer(ray.workers[0], [1.0, 4.0])
        if len(ray.workers) == 3 and "estimate" in ray.workers[2].calls:
            answer(ray.workers[2], [2.0, 3.0])

    ray.before_waiting = advance
    found, columns = run.group.estimate(job, groups)
    assert found.scalars["advantages"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert ray.workers[0].arguments["estimate"][0] == ((0, 0), (1, 0))
    assert ray.workers[0].arguments["estimate"][2:] == ("object 0", "object 2")
    assert ray.workers[2].arguments["estimate"][2:] == ("object 1",)
    column = columns["advantages"]
    assert column.refs == tuple(f"column 1 of {id(worker)}" for worker in (ray.workers[0], ray.workers[2]))
    assert column.find_parts(job.keys_S).tolist() == [0, 1, 1, 0]
    assert run.messages[0].startswith("rollout worker 1 was lost (")


def test_worker_whose_node_is_lost_before_it_starts_is_restarted(ray: FakeRay) -> None:
    run = start_group(ray, workers=1)

    def advance() -> None:
        if len(ray.workers) == 1:
            ray.workers[0].die(ActorUnschedulableError("the node does not exist any more"))
        else:
            ray.finish_all()

    ray.before_waiting = advance
    assert len(list(run.stream())) == 4
    assert run.messages[0].endswith("restarting it (restart 1 of 20)")


def test_worker_start_times_out(ray: FakeRay) -> None:
    ray.builds = False
    started_at = ray.now
    with pytest.raises(WorkerError, match=r"rollout worker start: no answer within 30 s from rollout worker 0"):
        start_group(ray, workers=1)
    assert ray.now - started_at < 35
    assert ray.killed == ray.workers


def test_worker_that_dies_repeatedly_aborts_the_run(ray: FakeRay) -> None:
    run = start_group(ray, workers=1)
    ray.before_waiting = lambda: ray.workers[-1].die()
    with pytest.raises(RestartLimitError, match="rollout worker 0 was lost 3 times for the same reason"):
        list(run.stream())


def test_shutdown_lets_workers_close_their_rewards_before_it_kills_them(ray: FakeRay) -> None:
    run = start_group(ray)
    ray.workers[1].is_responsive = False
    begun = ray.now
    ray.before_waiting = lambda: ray.killed and pytest.fail("killed before it has closed")
    run.group.shutdown()
    assert ray.now - begun == rollout_workers.SHUTDOWN_SECONDS
    assert ray.killed == ray.workers
