"""Groups in flight on the rollout workers: which calls carry them, errors and cancellation, with scripted workers."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from megarl.config.trainer import ParallelConfig
from megarl.errors import RewardError, WorkerError
from megarl.groups import group_stream
from tests.groups.scripted_workers import FakeRay, finish, make_jobs, ray, start_group

__all__ = ["ray"]


@pytest.mark.parametrize(
    ("prompts", "mini_batches", "slots", "expected"),
    [(64, 1, 1, 8), (2048, 2, 512, 4), (1024, 2, 512, 2), (8, 1, 64, 1)],
)
def test_objects_are_smaller_than_the_share_of_a_replica(
    prompts: int, mini_batches: int, slots: int, expected: int
) -> None:
    """Ranks of 8 slots are one replica, where there are several."""
    config: Any = SimpleNamespace(
        placement=SimpleNamespace(slots=slots),
        trainer=SimpleNamespace(parallel=ParallelConfig(tp=min(8, slots))),
        algorithm=SimpleNamespace(prompts_per_step=prompts, num_mini_batches=mini_batches),
    )
    assert group_stream.groups_per_object(config) == expected


def test_groups_that_have_finished_meanwhile_return_in_one_call_of_several_objects(ray: FakeRay) -> None:
    run = start_group(ray, workers=1)
    run.group._max_per_object = 1
    (worker,) = ray.workers
    stream = run.stream()
    ray.before_waiting = ray.finish_all
    found = list(stream)
    assert [group.summary.group_id for group in found] == [0, 1, 2, 3]
    assert worker.collect_calls.options_given == {"num_returns": 1 + 3}
    assert len({group.payload.ref for group in found}) == 4
    assert {group.payload.index for group in found} == {0}


def test_a_call_has_objects_for_twice_as_many_groups_as_the_one_before(ray: FakeRay) -> None:
    """Groups that finish at the same pace return in fewer and fewer calls."""
    run = start_group(ray, workers=1)
    run.group._max_per_object = 2
    (worker,) = ray.workers
    stream = run.group.open_stream()
    stream.submit(*make_jobs(12))
    num_objects = [1]
    finished = 0
    for count in (1, 2, 3, 4):
        ray.before_waiting = partial(finish, worker, *(f"step-3-{n}" for n in range(finished, finished + count)))
        finished += len(stream.wait("step-3"))
        num_objects.append(worker.collect_calls.options_given["num_returns"] - 1)
    assert num_objects == [1, 1, 2, 3, 1]  # two groups are left at last, and need one object


def test_adjacent_groups_are_sent_to_one_worker_if_all_workers_get_some(ray: FakeRay) -> None:
    run = start_group(ray, workers=2)
    run.group._max_per_object = 2
    jobs, stream = make_jobs(9), run.group.open_stream()
    for sent_together in (jobs[:7], jobs[7:8], jobs[8:]):
        stream.submit(*sent_together)
    sent = [[int(name.rpartition("-")[2]) for name in worker.calls] for worker in ray.workers]
    assert sent == [[0, 1, 4, 5, 7], [2, 3, 6, 8]]


def test_unfinished_groups_are_cancelled_if_a_group_fails(ray: FakeRay) -> None:
    run = start_group(ray)
    first, second = ray.workers
    stream = run.stream()

    def fail() -> None:
        finish(first, "step-3-0")
        second.calls["step-3-2"].end(RayError("no answer"))

    ray.before_waiting = fail
    assert next(stream).summary.group_id == 0
    with pytest.raises(WorkerError, match="rollout failed on rollout worker 1"):
        next(stream)
    assert ray.cancelled() == ["step-3-1", "step-3-2", "step-3-3"]
    assert ray.killed == []


def test_groups_are_returned_before_the_error_of_another_in_the_same_call(ray: FakeRay) -> None:
    run = start_group(ray, workers=1)
    (worker,) = ray.workers
    stream = run.stream()

    def fail() -> None:
        finish(worker, "step-3-0", "step-3-2")
        worker.calls["step-3-3"].end(RewardError("no such column"))

    ray.before_waiting = fail
    assert [next(stream).summary.group_id for _ in range(2)] == [0, 2]
    with pytest.raises(RewardError, match="no such column"):
        next(stream)
    assert ray.cancelled() == ["step-3-1", "step-3-3"]


def test_finished_groups_are_taken_without_waiting_for_others(ray: FakeRay) -> None:
    run = start_group(ray)
    stream = run.group.open_stream()
    for job in make_jobs():
        stream.submit(job)
    begun = ray.now
    assert stream.take_finished(0.5) == []
    assert ray.now == begun + 0.5
    finish(ray.workers[0], "step-3-0", "step-3-2")
    assert sorted(group.summary.group_id for _, group in stream.take_finished(0.5)) == [0, 2]
    ray.workers[1].calls["step-3-1"].end(RayError("no answer"))
    assert stream.take_finished(0.5) == []
    with pytest.raises(WorkerError, match="no answer"):
        stream.wait("step-3")


def test_canceled_groups_are_not_returned(ray: FakeRay) -> None:
    jobs, stream = make_jobs(), start_group(ray).group.open_stream()
    stream.submit(jobs[0])
    stream.submit(*jobs[1:])
    assert [list(worker.calls) for worker in ray.workers] == [["step-3-0", "step-3-2"], ["step-3-1", "step-3-3"]]
    stream.cancel(["step-3-0", "step-3-1", "step-3-9"])
    assert len(stream) == 2
    assert ray.cancelled() == ["step-3-0", "step-3-1"]
    ray.before_waiting = ray.finish_all
    returned = [(job.request_id, group.summary.group_id) for _ in range(2) for job, group in stream.wait("step-3")]
    assert sorted(returned) == [("step-3-2", 2), ("step-3-3", 3)]
    assert stream.wait("step-3") == []
