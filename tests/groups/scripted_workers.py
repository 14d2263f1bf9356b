"""Rollout workers that fail, die or hang as a test says, on a fake Ray with a fake clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayError

from megarl.batch.trajectory import Prompt
from megarl.config.recovery import RecoveryConfig
from megarl.config.trainer import ParallelConfig
from megarl.groups import group_stream, rollout_group, rollout_workers
from megarl.groups.rollout_group import RolloutGroup
from megarl.rollout.engine import Sampling
from megarl.rollout.rollout_worker import GroupJob, GroupSummary
from megarl.supervision import liveness_probe
from megarl.supervision.liveness_probe import LIVENESS_GROUP
from megarl.supervision.restart_budget import RestartBudget
from megarl.workers import failures
from megarl.workers.worker_host import CollectedCalls
from tests.groups.test_remote_engine import ended_future

PROMPTS = [Prompt(prompt_id=f"d.jsonl:{n}", text="", token_ids=(1,), row={}) for n in range(4)]
SAMPLING = Sampling(temperature=1.0, max_new_tokens=4)


@dataclass(eq=False)
class Ref:
    value: Any = None
    is_done: bool = False
    was_cancelled: bool = False
    was_returned: bool = False

    def end(self, value: Any) -> None:
        self.value, self.is_done = value, True


class CollectRef(Ref):
    """The reference to the summaries of groups: done as soon as one of `refs` is that was not returned before."""

    def __init__(self, refs: Sequence[Ref], limit: int) -> None:
        self._refs, self._limit, self._found = refs, limit, list[tuple[int, Any]]()

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        if not self._found:
            done = [(i, ref) for i, ref in enumerate(self._refs) if ref.is_done and not ref.was_returned]
            for i, ref in done[: self._limit]:
                ref.was_returned = True
                self._found.append((i, ref.value))
        return bool(self._found)

    @property
    def value(self) -> Any:  # type: ignore[override]
        errors = [value for _, value in self._found if isinstance(value, RayError)]
        num_ready = sum(ref.is_done and not ref.was_returned for ref in self._refs)
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

    def __init__(self, ray: FakeRay) -> None:
        self.ray, self.is_responsive, self.calls, self.pings = ray, True, dict[str, Ref](), list[Ref]()
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.invoke, self.process_info = method(self._invoke), method(self._answer_ping)
        self.begin_calls, self.collect_calls = method(self._begin_calls), method(self._collect_calls)
        self.cancel_calls = method(self._cancel_calls)
        self.batches: dict[str, list[Ref]] = {}
        self.preimport = method(lambda *_: Ref())
        self.build = method(lambda *_: Ref(is_done=ray.builds))
        self.stop = method(lambda: Ref(is_done=self.is_responsive))

    def _invoke(self, name: str, *arguments: Any) -> Any:
        self.calls[name], self.arguments[name] = Ref(), arguments
        if name == "record":
            return self.calls[name]
        num_returns = self.invoke.options_given["num_returns"]
        return [self.calls[name], *(f"column {n} of {id(self)}" for n in range(1, num_returns))]

    def _begin_calls(self, batch_id: str, name: str, jobs: Sequence[Any], *limits: int) -> list[Any]:
        assert name == "rollout_group"
        self.batches[batch_id] = [Ref() for _ in jobs]
        self.calls |= {job.request_id: ref for job, ref in zip(jobs, self.batches[batch_id], strict=True)}
        assert self.begin_calls.options_given == {"num_returns": 2}
        return self._collect(batch_id, *limits)

    def _collect_calls(self, batch_id: str, per_object: int, num_objects: int) -> list[Any]:
        assert self.collect_calls.options_given == {"num_returns": 1 + num_objects}
        return self._collect(batch_id, per_object, num_objects)

    def _collect(self, batch_id: str, per_object: int, num_objects: int) -> list[Any]:
        call = CollectRef(self.batches[batch_id], per_object * num_objects)
        return [call, *(f"groups of {id(call)}: {n}" for n in range(num_objects))]

    def _cancel_calls(self, batch_id: str, indices: Sequence[int]) -> None:
        for index in indices:
            self.batches[batch_id][index].was_cancelled = True

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

    def kill(self, worker: FakeWorker) -> None:
        self.killed.append(worker)
        worker.die()

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def finish_all(self) -> None:
        """Finish the groups that any live worker has."""
        for worker in self.workers:
            if worker not in self.killed:
                finish(worker, *worker.calls)

    def cancelled(self) -> list[str]:
        """Return the groups that were cancelled."""
        return sorted(name for worker in self.workers for name, ref in worker.calls.items() if ref.was_cancelled)


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
        return [(ref, ended_future(ref.value)) for ref in done]


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
    messages, budget = list[str](), RecoveryConfig(**recovery)
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


def make_jobs(count: int = 4) -> list[GroupJob]:
    """Return jobs of step 3."""
    return [
        GroupJob(prompt=PROMPTS[i % 4], group_id=i, num_samples=1, sampling=SAMPLING, request_id=f"step-3-{i}")
        for i in range(count)
    ]


def finish(worker: FakeWorker, *requests: str, replayed: bool = False) -> None:
    times = {"generation_seconds": 1.0, "scoring_seconds": 1.0}
    for request in requests:
        number = int(request.rpartition("-")[2])
        prompt_id = PROMPTS[number % len(PROMPTS)].prompt_id
        worker.calls[request].end(
            GroupSummary(group_id=number, prompt_id=prompt_id, trajectories=(), replayed=replayed, **times)
        )
