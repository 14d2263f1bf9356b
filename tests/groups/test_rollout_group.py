"""Rollout workers that fail, die or hang, with a fake Ray and clock."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError

from megarl.algorithms.grpo import group_estimates
from megarl.batch.trajectory import Prompt
from megarl.config.recovery import RecoveryConfig
from megarl.config.trainer import ParallelConfig
from megarl.errors import RestartLimitError, RewardError, WorkerError
from megarl.groups import group_stream, rollout_group, rollout_workers
from megarl.groups.estimation.estimate_job import TOKENS_PER_WORKER, EstimateJob, EstimateSummary
from megarl.groups.group_stream import FinishedGroup
from megarl.groups.rollout_group import RolloutGroup
from megarl.rollout.engine import Sampling
from megarl.rollout.rollout_worker import GroupJob, GroupSummary
from megarl.supervision import liveness_probe
from megarl.supervision.liveness_probe import LIVENESS_GROUP
from megarl.supervision.restart_budget import RestartBudget
from megarl.workers import failures
from megarl.workers.payload import StoredItem
from megarl.workers.worker_host import CollectedCalls

PROMPTS = [Prompt(prompt_id=f"d.jsonl:{n}", text="", token_ids=(1,), row={}) for n in range(4)]
SAMPLING = Sampling(temperature=1.0, max_new_tokens=4)


@dataclass(eq=False)
class Ref:
    value: Any = None
    is_done: bool = False
    was_cancelled: bool = False

    def end(self, value: Any) -> None:
        self.value, self.is_done = value, True


@dataclass(eq=False)
class FakeBatch:
    """Groups that a worker was sent in one call."""

    refs: list[Ref]
    returned: set[int] = field(default_factory=set)


class CollectRef(Ref):
    """The reference to the summaries of groups: done as soon as a group is that was not returned before."""

    def __init__(self, batch: FakeBatch, per_object: int, num_objects: int) -> None:
        self._batch, self._limit, self._found = batch, per_object * num_objects, list[tuple[int, Any]]()

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        if not self._found:
            done = [(i, ref) for i, ref in enumerate(self._batch.refs) if ref.is_done and i not in self._batch.returned]
            self._found = [(i, ref.value) for i, ref in done[: self._limit]]
            self._batch.returned.update(i for i, _ in self._found)
        return bool(self._found)

    @property
    def value(self) -> Any:  # type: ignore[override]
        errors = [value for _, value in self._found if isinstance(value, RayError)]
        num_ready = sum(ref.is_done for ref in self._batch.refs) - len(self._batch.returned)
        return errors[0] if errors else CollectedCalls(tuple(self._found), num_ready)


def method(call: Callable[..., Any]) -> Any:
    """Return a fake actor method that calls `call` and records the options it was given."""
    found = SimpleNamespace(remote=call, options_given=None)

    def options(**options_given: Any) -> Any:
        found.options_given = options_given
        return found

    found.options = options
    return found


class FakeWorker:
    """Fake worker: builds at once if `ray.builds`, answers pings if `is_responsive`; the test finishes its groups."""

    def __init__(self, ray: "FakeRay") -> None:
        self.ray, self.is_responsive, self.calls, self.pings = ray, True, dict[str, Ref](), list[Ref]()
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.invoke, self.process_info = method(self._invoke), method(self._answer_ping)
        self.begin_calls, self.collect_calls = method(self._begin_calls), method(self._collect_calls)
        self.cancel_calls = method(self._cancel_calls)
        self.batches: dict[str, FakeBatch] = {}
        self.preimport = method(lambda *_: Ref())
        self.build = method(lambda *_: Ref(is_done=ray.builds))
        self.stop = method(lambda: Ref(is_done=self.is_responsive))

    def _invoke(self, name: str, *arguments: Any) -> Any:
        self.calls[name], self.arguments[name] = Ref(), arguments
        if name == "record":
            return self.calls[name]
        num_returns = self.invoke.options_given["num_returns"]
        return [self.calls[name], *(f"column {n} of {id(self)}" for n in range(1, num_returns))]

    def _begin_calls(
        self, batch_id: str, name: str, jobs: Sequence[Any], per_object: int, num_objects: int
    ) -> list[Any]:
        assert name == "rollout_group"
        refs = [Ref() for _ in jobs]
        self.batches[batch_id] = FakeBatch(refs)
        self.calls |= {job.request_id: ref for job, ref in zip(jobs, refs, strict=True)}
        assert self.begin_calls.options_given == {"num_returns": 2}
        return self._collect(batch_id, per_object, num_objects)

    def _collect_calls(self, batch_id: str, per_object: int, num_objects: int) -> list[Any]:
        assert self.collect_calls.options_given == {"num_returns": 1 + num_objects}
        return self._collect(batch_id, per_object, num_objects)

    def _collect(self, batch_id: str, per_object: int, num_objects: int) -> list[Any]:
        call = CollectRef(self.batches[batch_id], per_object, num_objects)
        return [call, *(f"groups of {id(call)}: {n}" for n in range(num_objects))]

    def _cancel_calls(self, batch_id: str, indices: Sequence[int]) -> None:
        for index in indices:
            self.batches[batch_id].refs[index].was_cancelled = True

    def _answer_ping(self) -> Ref:
        assert self.process_info.options_given == {"concurrency_group": LIVENESS_GROUP}
        self.pings.append(Ref(is_done=self.is_responsive))
        return self.pings[-1]

    def die(self, error: RayError | None = None) -> None:
        for ref in self.calls.values():
            if not ref.is_done:
                ref.end(error or ActorDiedError())


@dataclass
class FakeRay:
    """Fake Ray and clock: waiting advances the time; `before_waiting` is called before each wait."""

    now: float = 100.0
    builds: bool = True
    workers: list[FakeWorker] = field(default_factory=list)
    killed: list[FakeWorker] = field(default_factory=list)
    before_waiting: Callable[[], None] = lambda: None

    def remote(self, *, concurrency_groups: dict[str, int]) -> Any:
        assert concurrency_groups == {LIVENESS_GROUP: 1}

        def launch(environment: Any) -> FakeWorker:
            self.workers.append(FakeWorker(self))
            return self.workers[-1]

        return lambda _: method(launch)

    def wait(self, refs: list[Ref], *, num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], Any]:
        if timeout:
            self.before_waiting()
        done = [ref for ref in refs if ref.is_done][:num_returns]
        if len(done) < num_returns:
            assert timeout is not None
            self.now += timeout
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: Ref | list[Ref]) -> Any:
        if isinstance(ref, list):
            return [self.get(each) for each in ref]
        assert ref.is_done
        if isinstance(ref.value, RayError):
            raise ref.value
        return ref.value

    def cancel(self, ref: Ref, *, recursive: bool) -> None:
        assert not recursive  # other jobs may share the same call to an engine
        ref.was_cancelled = True

    def kill(self, worker: FakeWorker) -> None:
        self.killed.append(worker)
        worker.die()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeCompletions:
    """Stands in for `Completions`: polls the fake Ray."""

    def __init__(self, ray: FakeRay) -> None:
        self._ray, self._refs = ray, list[Ref]()

    def add(self, ref: Ref) -> None:
        self._refs.append(ref)

    def wait(self, timeout: float) -> list[tuple[Ref, Future[Any]]]:
        done, _ = self._ray.wait(self._refs, num_returns=1, timeout=timeout)
        done = [ref for ref in self._refs if ref.is_done] if done else []
        self._refs = [ref for ref in self._refs if ref not in done]
        return [(ref, self._ended(ref)) for ref in done]

    def _ended(self, ref: Ref) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(ref.value, RayError):
            future.set_exception(ref.value)
        else:
            future.set_result(ref.value)
        return future


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    for module in (group_stream, rollout_group, rollout_workers, liveness_probe, failures):
        monkeypatch.setattr(module, "ray", fake)
        monkeypatch.setattr(module, "time", fake, raising=False)
    monkeypatch.setattr(group_stream, "Completions", lambda: FakeCompletions(fake))
    monkeypatch.setattr(failures, "_ray_log_folder", lambda: None)
    monkeypatch.setattr(rollout_workers, "nodes_for_light_workers", lambda: [SimpleNamespace(id="node")])
    monkeypatch.setattr(rollout_workers, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
    return fake


@dataclass
class Run:
    group: RolloutGroup
    messages: list[str]

    def stream(self) -> Any:
        return self.group.stream(PROMPTS, num_samples=2, sampling=SAMPLING, label="step-3")


def start_group(ray: FakeRay, workers: int = 2, **recovery: Any) -> Run:
    messages: list[str] = []
    budget = RecoveryConfig(**recovery)
    config: Any = SimpleNamespace(
        run_dir="run",
        recovery=budget,
        rollout=SimpleNamespace(request_timeout_seconds=600.0, workers=workers),
        placement=SimpleNamespace(start_timeout_seconds=30.0, slots=1),
        trainer=SimpleNamespace(parallel=ParallelConfig()),
        algorithm=SimpleNamespace(prompts_per_step=64, num_mini_batches=1),
    )
    supervisor = SimpleNamespace(
        restart_budget=RestartBudget(budget, messages.append), refs=list, poll=lambda: None, serving=[0]
    )
    engines: Any = SimpleNamespace(supervisor=supervisor, remote_engines=lambda: ["engine 0"])
    group = RolloutGroup(config, engines)
    group.start()
    return Run(group, messages)


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
    ray.before_waiting = lambda: finish(worker, *(f"step-3-{n}" for n in range(4)))
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
    jobs = [
        GroupJob(prompt=PROMPTS[0], group_id=0, num_samples=1, sampling=SAMPLING, request_id=f"step-3-{i}")
        for i in range(12)
    ]
    stream = run.group.open_stream()
    stream.submit(*jobs)
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
    jobs = [
        GroupJob(prompt=PROMPTS[0], group_id=i, num_samples=1, sampling=SAMPLING, request_id=f"step-3-{i}")
        for i in range(9)
    ]
    stream = run.group.open_stream()
    stream.submit(*jobs[:7])
    stream.submit(jobs[7])
    stream.submit(jobs[8])
    sent = [[int(name.rpartition("-")[2]) for name in worker.calls] for worker in ray.workers]
    assert sent == [[0, 1, 4, 5, 7], [2, 3, 6, 8]]


def finish(worker: FakeWorker, *requests: str, replayed: bool = False) -> None:
    for request in requests:
        number = int(request.rpartition("-")[2])
        worker.calls[request].end(
            GroupSummary(
                group_id=number,
                prompt_id=PROMPTS[number % len(PROMPTS)].prompt_id,
                trajectories=(),
                generation_seconds=1.0,
                scoring_seconds=1.0,
                replayed=replayed,
            )
        )


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
    cancelled = {name for worker in ray.workers for name, ref in worker.calls.items() if ref.was_cancelled}
    assert cancelled == {"step-3-1", "step-3-2", "step-3-3"}
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
    assert [name for name, ref in worker.calls.items() if ref.was_cancelled] == ["step-3-1", "step-3-3"]


def test_finished_groups_are_taken_without_waiting_for_others(ray: FakeRay) -> None:
    run = start_group(ray)
    stream = run.group.open_stream()
    for i, prompt in enumerate(PROMPTS):
        job = GroupJob(prompt=prompt, group_id=i, num_samples=1, sampling=SAMPLING, request_id=f"step-3-{i}")
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
    run = start_group(ray)
    jobs = [
        GroupJob(prompt=prompt, group_id=i, num_samples=1, sampling=SAMPLING, request_id=f"step-3-{i}")
        for i, prompt in enumerate(PROMPTS)
    ]
    stream = run.group.open_stream()
    stream.submit(jobs[0])
    stream.submit(*jobs[1:])
    assert [list(worker.calls) for worker in ray.workers] == [["step-3-0", "step-3-2"], ["step-3-1", "step-3-3"]]
    stream.cancel(["step-3-0", "step-3-1", "step-3-9"])
    assert len(stream) == 2
    cancelled = {name for worker in ray.workers for name, ref in worker.calls.items() if ref.was_cancelled}
    assert cancelled == {"step-3-0", "step-3-1"}

    def answer() -> None:
        for worker in ray.workers:
            finish(worker, *worker.calls)

    ray.before_waiting = answer
    returned = [(job.request_id, group.summary.group_id) for _ in range(2) for job, group in stream.wait("step-3")]
    assert sorted(returned) == [("step-3-2", 2), ("step-3-3", 3)]
    assert stream.wait("step-3") == []


def test_number_of_replayed_groups_is_reported(ray: FakeRay) -> None:
    run = start_group(ray, workers=1)

    def answer() -> None:
        finish(ray.workers[0], "step-3-0", "step-3-2", "step-3-3", replayed=True)
        finish(ray.workers[0], "step-3-1")

    ray.before_waiting = answer
    assert sorted(group.summary.group_id for group in run.stream()) == [0, 1, 2, 3]
    assert run.messages == ["step-3: replayed 3 of 4 groups from the journal"]
    assert not any(ref.was_cancelled for ref in ray.workers[0].calls.values())
    run.messages.clear()
    ray.before_waiting = lambda: finish(ray.workers[0], *(f"step-3-{n}" for n in range(4)))
    list(run.stream())
    assert run.messages == []


def test_hung_worker_is_replaced_and_its_groups_are_resubmitted(ray: FakeRay) -> None:
    run = start_group(ray, engine_stall_seconds=20)
    first, second = ray.workers
    second.is_responsive, started_at = False, ray.now

    def advance() -> None:
        if len(ray.workers) == 3:
            finish(first, "step-3-0", "step-3-1")
            finish(ray.workers[2], *ray.workers[2].calls)

    ray.before_waiting = advance
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

    def advance() -> None:
        if ray.now > started_at + 300:
            for worker in ray.workers:
                finish(worker, *worker.calls)

    ray.before_waiting = advance
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
            finish(ray.workers[1], *ray.workers[1].calls)

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
