"""Rollout groups on workers that fail, die or hang as a test says, on a fake Ray with a fake clock."""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError

from megarl.algorithms.grpo import group_estimates
from megarl.batch.trajectory import Prompt
from megarl.cluster.workers import failures
from megarl.cluster.workers.dispatch import StoredItem
from megarl.cluster.workers.worker_host import CollectedCalls
from megarl.config.run import RecoveryConfig
from megarl.config.trainer import ParallelConfig
from megarl.engines.engine import Sampling
from megarl.errors import RestartLimitError, RewardError, WorkerError
from megarl.rollout.estimate_job import TOKENS_PER_WORKER, EstimateSummary
from megarl.rollout.rollout_worker import GroupJob, GroupSummary
from megarl.run.remote import rollout_group, rollout_workers
from megarl.run.remote.remote_engine import RemoteEngine
from megarl.run.remote.rollout_group import FinishedGroup, RolloutGroup
from megarl.run.supervision import engine_supervisor
from megarl.run.supervision.engine_supervisor import LIVENESS_GROUP
from megarl.run.supervision.restart_budget import RestartBudget
from tests.errors import expect_error
from tests.fake_ray import FakeRay, Ref
from tests.rollout.estimates import make_job
from tests.run.finished_groups import completion, finished_group
from tests.run.remote.test_engine_group import ended_future

PROMPTS = [Prompt(prompt_id=f"d.jsonl:{n}", text="", token_ids=(1,), row={}) for n in range(4)]
SAMPLING = Sampling(temperature=1.0, max_new_tokens=4)


class CollectRef(Ref):
    """The reference to the summaries of groups: done as soon as one of `refs` is that was not returned before."""

    def __init__(self, refs, limit):
        self._refs, self._limit, self._found = refs, limit, []

    @property
    def is_done(self):
        if not self._found:
            done = [(i, ref) for i, ref in enumerate(self._refs) if ref.is_done and not ref.was_returned]
            for i, ref in done[: self._limit]:
                ref.was_returned = True
                self._found.append((i, ref.value))
        return bool(self._found)

    @property
    def value(self):
        errors = [value for _, value in self._found if isinstance(value, RayError)]
        num_ready = sum(ref.is_done and not ref.was_returned for ref in self._refs)
        return errors[0] if errors else CollectedCalls(tuple(self._found), num_ready)


def method(call):
    """Return a fake actor method that calls `call` and records the options it was given."""
    found = SimpleNamespace(remote=call, options_given=None)

    def options(**options_given):
        found.options_given = options_given
        return found

    found.options = options
    return found


class FakeWorker:
    """Fake worker: builds at once if `ray.builds`, answers pings if `is_responsive`; the test finishes its groups."""

    def __init__(self, ray):
        self.ray, self.is_responsive, self.calls, self.arguments, self.pings = ray, True, {}, {}, []
        self.invoke, self.process_info = method(self._invoke), method(self._answer_ping)
        self.begin_calls, self.collect_calls = method(self._begin_calls), method(self._collect_calls)
        self.cancel_calls = method(self._cancel_calls)
        self.batches, self.jobs = {}, []
        self.preimport = method(lambda *_: Ref())
        self.building = []
        self.build = method(self._build)
        self.stop = method(lambda: Ref(is_done=self.is_responsive))

    def _invoke(self, name, *arguments):
        self.calls[name], self.arguments[name] = Ref(), arguments
        if name in ("record", "update_engines"):
            return self.calls[name]
        num_returns = self.invoke.options_given["num_returns"]
        return [self.calls[name], *(f"column {n} of {id(self)}" for n in range(1, num_returns))]

    def _build(self, *_):
        self.building.append(Ref(is_done=self.ray.builds))
        return self.building[-1]

    def _begin_calls(self, batch_id, name, jobs, *limits):
        assert name == "rollout_group"
        self.jobs += jobs
        self.batches[batch_id] = [Ref() for _ in jobs]
        self.calls |= {job.request_id: ref for job, ref in zip(jobs, self.batches[batch_id], strict=True)}
        assert self.begin_calls.options_given == {"num_returns": 2}
        return self._collect(batch_id, *limits)

    def _collect_calls(self, batch_id, per_object, num_objects):
        assert self.collect_calls.options_given == {"num_returns": 1 + num_objects}
        return self._collect(batch_id, per_object, num_objects)

    def _collect(self, batch_id, per_object, num_objects):
        call = CollectRef(self.batches[batch_id], per_object * num_objects)
        return [call, *(f"groups of {id(call)}: {n}" for n in range(num_objects))]

    def _cancel_calls(self, batch_id, indices):
        for index in indices:
            self.batches[batch_id][index].was_cancelled = True

    def _answer_ping(self):
        assert self.process_info.options_given == {"concurrency_group": LIVENESS_GROUP}
        self.pings.append(Ref(is_done=self.is_responsive))
        return self.pings[-1]

    def die(self, error=None):
        for ref in self.calls.values():
            if not ref.is_done:
                ref.end(error or ActorDiedError())


class RolloutRay(FakeRay):
    """A fake Ray that starts rollout workers."""

    def __init__(self):
        super().__init__()
        self.builds, self.workers = True, []

    def remote(self, *, concurrency_groups):
        assert concurrency_groups == {LIVENESS_GROUP: 1}

        def launch(environment):
            self.workers.append(FakeWorker(self))
            return self.workers[-1]

        return lambda _: method(launch)

    def finish_all(self):
        """Finish the groups that any live worker has."""
        for worker in self.workers:
            if worker not in self.killed:
                finish(worker, *worker.calls)

    def cancelled(self):
        """Return the groups that were cancelled."""
        return sorted(name for worker in self.workers for name, ref in worker.calls.items() if ref.was_cancelled)


class FakeCompletions:
    """Stands in for `Completions`: polls the fake Ray."""

    def __init__(self, ray):
        self._ray, self._refs = ray, []

    def add(self, ref):
        self._refs.append(ref)

    def wait(self, timeout):
        done, _ = self._ray.wait(self._refs, num_returns=1, timeout=timeout)
        done = [ref for ref in self._refs if ref.is_done] if done else []
        self._refs = [ref for ref in self._refs if ref not in done]
        return [(ref, ended_future(ref.value)) for ref in done]


@pytest.fixture
def ray(monkeypatch):
    fake = RolloutRay()
    for module in (rollout_group, rollout_workers, engine_supervisor, failures):
        monkeypatch.setattr(module, "ray", fake)
        monkeypatch.setattr(module, "time", fake, raising=False)
    monkeypatch.setattr(rollout_group, "Completions", lambda: FakeCompletions(fake))
    monkeypatch.setattr(failures, "_ray_log_folder", lambda: None)
    monkeypatch.setattr(rollout_workers, "nodes_for_light_workers", lambda: [SimpleNamespace(id="node")])
    monkeypatch.setattr(rollout_workers, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
    return fake


def batch_config(prompts, mini_batches, slots):
    return SimpleNamespace(
        placement=SimpleNamespace(slots=slots, start_timeout_seconds=30.0),
        trainer=SimpleNamespace(parallel=ParallelConfig(tp=min(8, slots))),
        algorithm=SimpleNamespace(prompts_per_step=prompts, num_mini_batches=mini_batches),
    )


@dataclass
class Run:
    group: RolloutGroup
    messages: list[str]
    engines: list[object]
    """Handles of the engines; a test may replace them."""

    def stream(self):
        return self.group.stream(PROMPTS, num_samples=2, sampling=SAMPLING, label="step-3")


def start_group(ray, workers=2, engines=("engine 0",), **recovery):
    messages, budget = [], RecoveryConfig(**recovery)
    config = batch_config(64, 1, 1)
    config.run_dir, config.recovery = "run", budget
    config.rollout = SimpleNamespace(request_timeout_seconds=600.0, workers=workers)
    restarts, engines = RestartBudget(budget, messages.append), list(engines)
    supervisor = SimpleNamespace(restart_budget=restarts, refs=list, poll=lambda: None, serving=[0])
    group = RolloutGroup(
        config,
        SimpleNamespace(supervisor=supervisor, remote_engines=lambda: list(engines), name=lambda n: f"engine {n}"),
    )
    group.start()
    return Run(group, messages, engines)


def make_jobs(count=4):
    """Return jobs of step 3."""
    return [
        GroupJob(prompt=PROMPTS[i % 4], group_id=i, num_samples=1, sampling=SAMPLING, request_id=f"step-3-{i}")
        for i in range(count)
    ]


def finish(worker, *requests, replayed=False):
    times = {"generation_seconds": 1.0, "scoring_seconds": 1.0}
    for request in requests:
        number = int(request.rpartition("-")[2])
        prompt_id = PROMPTS[number % len(PROMPTS)].prompt_id
        done = GroupSummary(group_id=number, prompt_id=prompt_id, trajectories=(), replayed=replayed, **times)
        worker.calls[request].end(done)


@pytest.mark.parametrize(
    ("prompts", "mini_batches", "slots", "expected"),
    [(64, 1, 1, 8), (2048, 2, 512, 4), (1024, 2, 512, 2), (8, 1, 64, 1)],
)
def test_objects_are_smaller_than_the_share_of_a_replica(prompts, mini_batches, slots, expected):
    """Ranks of 8 slots are one replica, where there are several."""
    assert rollout_group.groups_per_object(batch_config(prompts, mini_batches, slots)) == expected


def test_groups_that_have_finished_meanwhile_return_in_one_call_of_several_objects(ray):
    run = start_group(ray, workers=1)
    run.group.max_per_object = 1
    (worker,) = ray.workers
    stream = run.stream()
    ray.before_waiting = ray.finish_all
    found = list(stream)
    assert [group.summary.group_id for group in found] == [0, 1, 2, 3]
    assert worker.collect_calls.options_given == {"num_returns": 1 + 3}
    assert len({group.payload.ref for group in found}) == 4
    assert {group.payload.index for group in found} == {0}


def test_a_call_has_objects_for_twice_as_many_groups_as_the_one_before(ray):
    """Groups that finish at the same pace return in fewer and fewer calls."""
    run = start_group(ray, workers=1)
    run.group.max_per_object = 2
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


def test_adjacent_groups_are_sent_to_one_worker_if_all_workers_get_some(ray):
    run = start_group(ray, workers=2)
    run.group.max_per_object = 2
    jobs, stream = make_jobs(9), run.group.open_stream()
    for sent_together in (jobs[:7], jobs[7:8], jobs[8:]):
        stream.submit(*sent_together)
    sent = [[int(name.rpartition("-")[2]) for name in worker.calls] for worker in ray.workers]
    assert sent == [[0, 1, 4, 5, 7], [2, 3, 6, 8]]


def test_unfinished_groups_are_cancelled_if_a_group_fails(ray):
    run = start_group(ray)
    first, second = ray.workers
    stream = run.stream()

    def fail():
        finish(first, "step-3-0")
        second.calls["step-3-2"].end(RayError("no answer"))

    ray.before_waiting = fail
    assert next(stream).summary.group_id == 0
    with expect_error(WorkerError, "1", "rollout", "failed"):
        next(stream)
    assert ray.cancelled() == ["step-3-1", "step-3-2", "step-3-3"]
    assert ray.killed == []


def test_groups_are_returned_before_the_error_of_another_in_the_same_call(ray):
    run = start_group(ray, workers=1)
    (worker,) = ray.workers
    stream = run.stream()

    def fail():
        finish(worker, "step-3-0", "step-3-2")
        worker.calls["step-3-3"].end(RewardError("no such column"))

    ray.before_waiting = fail
    assert [next(stream).summary.group_id for _ in range(2)] == [0, 2]
    with expect_error(RewardError, "column"):
        next(stream)
    assert ray.cancelled() == ["step-3-1", "step-3-3"]


def test_finished_groups_are_taken_without_waiting_for_others(ray):
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
    with expect_error(WorkerError, "answer"):
        stream.wait("step-3")


def test_taking_finished_groups_ends_while_others_arrive(ray):
    run = start_group(ray, workers=1)
    stream, numbers = run.group.open_stream(), iter(range(20))
    stream.submit(*make_jobs(20))

    def finish_another():
        ray.now += 0.4
        finish(ray.workers[0], f"step-3-{next(numbers)}")

    ray.before_waiting = finish_another
    assert len(stream.take_finished(0.5)) == 5
    assert len(stream) == 15


def test_canceled_groups_are_not_returned(ray):
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


def test_number_of_replayed_groups_is_reported(ray):
    run = start_group(ray, workers=1)

    def answer():
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


def test_hung_worker_is_replaced_and_its_groups_are_resubmitted(ray):
    run = start_group(ray, engine_stall_seconds=20)
    first, second = ray.workers
    second.is_responsive, started_at = False, ray.now

    ray.before_waiting = lambda: len(ray.workers) == 3 and ray.finish_all()
    assert sorted(group.summary.group_id for group in run.stream()) == [0, 1, 2, 3]
    assert 20 < ray.now - started_at < 35
    assert set(ray.killed) == {second}
    assert len(first.pings) >= 3
    hung = "rollout worker 1 has not answered a ping for 20 s (recovery.engine_stall_seconds); killing it"
    assert run.messages[0] == hung
    assert run.messages[1].startswith("rollout worker 1 was lost (")


def test_workers_that_hang_together_are_killed_and_replaced_together(ray, monkeypatch):
    """Each costs no time limit of its own, nor the time in which another one starts."""
    run = start_group(ray, workers=8, engine_stall_seconds=20)
    hung, started_at, nodes = ray.workers[2:6], ray.now, []
    for worker in hung:
        worker.is_responsive = False
    find_nodes = rollout_workers.nodes_for_light_workers
    monkeypatch.setattr(rollout_workers, "nodes_for_light_workers", lambda: nodes.append(ray.now) or find_nodes())
    ray.builds = False

    def advance():
        if len(ray.workers) == 12:
            for worker in ray.workers[8:]:
                for ref in worker.building:
                    ref.end()
            ray.finish_all()

    ray.before_waiting = advance
    jobs = make_jobs(16)
    stream = run.group.open_stream()
    stream.submit(*jobs)
    found = []
    while stream:
        found += [job.request_id for job, _ in stream.wait("step-3")]
    assert sorted(found) == sorted(job.request_id for job in jobs)
    assert 20 < ray.now - started_at < 35
    assert set(ray.killed) == set(hung)
    assert len(nodes) == 1
    assert run.messages == [
        "rollout workers 2, 3, 4 and 1 other have not answered a ping for 20 s (recovery.engine_stall_seconds); "
        "killing them",
        run.messages[1],
    ]
    assert run.messages[1].startswith(
        "4 rollout workers (rollout worker 2, rollout worker 3, rollout worker 4 and 1 other) were lost ("
    )
    assert run.messages[1].endswith("; restarting them (restarts 1 to 4 of 160)")


def test_a_check_of_many_workers_is_one_call(ray):
    run = start_group(ray, workers=256)
    workers = run.group.workers
    for _ in range(15):
        ray.now += 1.0
        workers.kill_hung(range(256))
    calls, wait = [], ray.wait
    ray.wait = lambda refs, **given: calls.append(len(refs)) or wait(refs, **given)
    workers.kill_hung(range(256))
    assert calls == [256]
    assert [len(worker.pings) for worker in ray.workers] == [1] * 256


def test_workers_learn_of_engines_lost_together_in_one_call_each(ray):
    run = start_group(ray, workers=4)
    workers, changes = run.group.workers, []
    for worker in ray.workers:
        worker.invoke = method(lambda name, *arguments: changes.append((name, arguments)))
    engines = [f"engine {n}" for n in range(1000)]
    workers._known_engines = list(engines)
    workers.engine_loads.start([True] * len(engines))
    supervisor = SimpleNamespace(poll=lambda: None)
    group = {"name": lambda n: f"engine {n}", "remote_engines": lambda: list(engines)}
    workers._engines = SimpleNamespace(supervisor=supervisor, **group)
    workers.poll_engines()
    assert changes == []
    for number in range(40):
        engines[number] = None
    engines[40] = "engine 40 again"
    workers.poll_engines()
    assert [name for name, _ in changes] == ["update_engines"] * 4
    (found,) = changes[0][1]
    assert [str(found[number]) for number in range(40)] == [f"engine {number} was lost" for number in range(40)]
    assert (found[40], len(found)) == ("engine 40 again", 41)
    workers.poll_engines()
    assert len(changes) == 4


def test_busy_worker_is_not_killed(ray):
    run = start_group(ray, engine_stall_seconds=20)
    started_at = ray.now

    ray.before_waiting = lambda: ray.now > started_at + 300 and ray.finish_all()
    assert len(list(run.stream())) == 4
    assert (ray.killed, run.messages) == ([], [])


def test_rollouts_are_written_with_the_rewards_of_each_sequence(ray):
    run = start_group(ray, workers=1)
    groups = [
        finished_group([completion([0, 1], reward=1.5), completion([1], reward=2.0, rewards={"a": 3.0})]),
        finished_group([completion([1, 1], rewards={"match": 0.5}, reward_errors={"match": "too large"})]),
    ]
    groups = [replace(group, payload=StoredItem(f"object {n}", 0)) for n, group in enumerate(groups)]
    run.group.record(3, groups, [0.1, 0.2, 0.3])
    step, rewards, advantages, places, *stored = ray.workers[0].arguments["record"]
    assert (step, advantages, places) == (3, (0.1, 0.2, 0.3), ((0, 0), (1, 0)))
    assert rewards == ((1.5, 2.0, 0.0), ({"match": 1.5}, {"a": 3.0}, {"match": 0.5}), ({}, {}, {"match": "too large"}))
    assert stored == ["object 0", "object 1"]
    forked = finished_group([completion([0, 1], reward=1.5), completion([1], reward=2.0)])
    summary = forked.summary.with_columns(segment_tokens=[(2, 1), ()])
    ray.workers[0].calls["record"].end(None)
    run.group.record(4, [replace(forked, summary=summary, payload=StoredItem("object", 0))], [0.1, 0.1, 0.2])
    assert ray.workers[0].arguments["record"][1][0] == (1.5, 1.5, 2.0)


def test_worker_that_hangs_while_writing_rollouts_is_replaced(ray):
    run = start_group(ray, workers=1, engine_stall_seconds=20)
    ray.workers[0].is_responsive = False
    run.group.record(3, [], [])

    def advance():
        if len(ray.workers) == 2 and "record" in ray.workers[1].calls:
            ray.workers[1].calls["record"].end(None)

    ray.before_waiting = advance
    run.group.flush_records()
    assert ray.killed[0] is ray.workers[0]
    assert run.messages[-1].startswith("rollout worker 0 was lost (")


def test_workers_share_an_estimate_and_that_of_a_dead_one_is_repeated(ray):
    run = start_group(ray)
    summary = None  # an estimate reads references only
    groups = [FinishedGroup(summary, StoredItem(f"object {n}", 0), worker=n % 2) for n in range(3)]
    one = completion([0, 1])
    job = make_job(group_estimates, (), [[one], [one, one], [one]], np.zeros(4), {}, ("advantages",))
    job = replace(job, num_tokens=2 * TOKENS_PER_WORKER)

    def answer(worker, values):
        if not worker.calls["estimate"].is_done:
            _, own, *_ = worker.arguments["estimate"]
            scalars = {"advantages": np.array(values)}
            worker.calls["estimate"].end(EstimateSummary(groups_N=own.groups_N, scalars=scalars, metrics={}))

    def advance():
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


def test_worker_whose_node_is_lost_before_it_starts_is_restarted(ray):
    run = start_group(ray, workers=1)

    def advance():
        if len(ray.workers) == 1:
            ray.workers[0].die(ActorUnschedulableError("the node does not exist any more"))
        else:
            ray.finish_all()

    ray.before_waiting = advance
    assert len(list(run.stream())) == 4
    assert run.messages[0].endswith("restarting it (restart 1 of 20)")


def test_worker_start_times_out(ray):
    ray.builds = False
    started_at = ray.now
    with expect_error(WorkerError, "30", "0", "rollout", "worker"):
        start_group(ray, workers=1)
    assert ray.now - started_at < 35
    assert ray.killed == ray.workers


def test_worker_that_dies_repeatedly_aborts_the_run(ray):
    run = start_group(ray, workers=1)
    ray.before_waiting = lambda: ray.workers[-1].die()
    with expect_error(RestartLimitError, "0", "3", "rollout", "worker"):
        list(run.stream())


def test_shutdown_lets_workers_close_their_rewards_before_it_kills_them(ray):
    run = start_group(ray)
    ray.workers[1].is_responsive = False
    begun = ray.now
    ray.before_waiting = lambda: ray.killed and pytest.fail("killed before it has closed")
    run.group.shutdown()
    assert ray.now - begun == rollout_workers.SHUTDOWN_SECONDS
    assert ray.killed == ray.workers


class FakeEngine:
    """The actor of an engine, which records calls."""

    def __init__(self):
        self.calls = []
        self.invoke = SimpleNamespace(remote=self._invoke)

    def _invoke(self, *call):
        self.calls.append(call)
        return Ref(is_done=True)


def make_engines(count):
    return [RemoteEngine(FakeEngine(), f"engine {n}") for n in range(count)]


def engines_of(worker):
    return {job.request_id: job.engine for job in worker.jobs}


def test_streams_of_a_run_name_engines_by_the_samples_of_all_of_them(ray):
    run = start_group(ray, engines=make_engines(4))
    background = run.group.open_stream()
    background.submit(*make_jobs(6))
    first, second = ray.workers
    named = engines_of(first) | engines_of(second)
    assert sorted(named.values()) == [0, 0, 1, 1, 2, 3]
    assert {engine % 2 for engine in engines_of(first).values()} == {0}
    assert {engine % 2 for engine in engines_of(second).values()} == {1}
    ray.before_waiting = lambda: finish(ray.workers[0], *[name for name in first.calls if name.startswith("step-4")])
    prompt = run.group.stream(PROMPTS[:1], num_samples=2, sampling=SAMPLING, label="step-4")
    assert next(prompt).summary.group_id == 0
    job = first.jobs[-1]
    assert (job.request_id, job.engine, job.priority) == ("step-4-0", 2, 1)  # the run waits for it
    assert {each.priority for each in first.jobs[:-1]} == {0}
    prompt.close()
    loads = run.group.workers.engine_loads
    assert loads.outstanding == [2, 2, 1, 1]
    background.cancel([name for name, engine in named.items() if engine == 0])
    assert loads.outstanding == [0, 2, 1, 1]
    background.close()
    assert loads.outstanding == [0] * 4


def test_an_engine_that_is_lost_or_restarted_has_no_samples_and_the_workers_learn_of_it(ray):
    engines = make_engines(3)
    run = start_group(ray, engines=engines)
    stream, workers = run.group.open_stream(), run.group.workers
    stream.submit(*make_jobs(6))
    assert workers.engine_loads.outstanding == [2, 2, 2]
    run.engines[0], run.engines[1] = None, make_engines(1)[0]
    workers.poll_engines()
    assert workers.engine_loads.outstanding == [0, 0, 2]
    assert all(worker.arguments["update_engines"][0].keys() == {0, 1} for worker in ray.workers)
    more = make_jobs(9)[6:]
    stream.submit(*more)
    named = {name: engine for worker in ray.workers for name, engine in engines_of(worker).items()}
    assert [named[job.request_id] for job in more] == [1, 1, 2]
    stream.close()
    assert workers.engine_loads.outstanding == [0, 0, 0]


def test_engines_drop_the_requests_of_a_worker_that_died_before_its_groups_are_sampled_again(ray):
    engines = make_engines(2)
    run = start_group(ray, engines=engines)
    died = ray.workers[1]
    calls_before = []

    def advance():
        if len(ray.workers) == 2:
            died.die()
        else:
            calls_before.append([list(engine.handle.calls) for engine in engines])
            ray.finish_all()

    ray.before_waiting = advance
    assert len(list(run.stream())) == 4
    dropped = [("abort_groups", [job.request_id for job in died.jobs])]
    assert calls_before[0] == [dropped, dropped]
    assert [job.request_id for job in ray.workers[2].jobs] == [job.request_id for job in died.jobs]
    assert {job.engine for job in ray.workers[2].jobs} == {1}
    assert run.group.workers.engine_loads.outstanding == [0, 0]


def test_a_wait_has_no_limit_of_its_own_and_says_that_it_waits(ray):
    run = start_group(ray)
    started_at = ray.now
    ray.before_waiting = lambda: ray.now > started_at + 5000 and ray.finish_all()
    assert len(list(run.stream())) == 4
    waited = "step-3: none of 4 groups in flight has finished for {} s; still waiting"
    assert run.messages == [waited.format(seconds) for seconds in (600, 1200, 2400, 4800)]


def test_a_wait_ends_with_the_limit_of_its_phase(ray):
    run = start_group(ray)
    started_at = ray.now
    limit = WorkerError("generate exceeded recovery.phase_timeout_seconds")
    stream = run.stream()
    with failures.abort_check(lambda late: limit if ray.now > started_at + 3600 else None), pytest.raises(WorkerError):
        next(stream)
    assert 3600 < ray.now - started_at < 3610
    assert len(ray.cancelled()) == 4
