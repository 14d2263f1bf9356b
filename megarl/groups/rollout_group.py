"""Rollout workers as the controller calls them: prompts in, finished groups out, their tokens left where they are."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.batch.pack import Column
from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config import RunConfig
from megarl.errors import LostEngineError, WorkerError
from megarl.groups.engine_group import EngineGroup
from megarl.groups.estimation import EstimateJob, Findings
from megarl.groups.remote_engine import RemoteEngine
from megarl.groups.rollout_actor import Rewards, RolloutProcess
from megarl.megatron.requests import TokenColumn
from megarl.placement.nodes import light_nodes
from megarl.process.startup_trace import ProcessStart
from megarl.rollout.engine import Sampling
from megarl.rollout.rollout_worker import GroupJob, GroupSummary
from megarl.supervision.engine_supervisor import LOOK_SECONDS
from megarl.supervision.liveness_probe import SIGNS, WorkerPulse
from megarl.workers.failures import check_deadline, raise_failure, translate, wait_all, wait_any
from megarl.workers.payload import StoredPayload
from megarl.workers.worker_host import AsyncShell

DEATHS = (RayActorError, ActorUnschedulableError)
"""What calls to a worker end in that has died, or whose machine was lost before it was there."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """One prompt's scored samples."""

    summary: GroupSummary
    payload: StoredPayload[list[Trajectory]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A job that a worker has been given."""

    job: GroupJob
    worker: int
    payload: Any


@dataclass(frozen=True, slots=True)
class _Recording:
    """Rollouts that a worker has been told to write."""

    index: int
    worker: Any
    arguments: tuple[Any, ...]


class RolloutGroup:
    """Spreads prompts over the rollout workers, each of which balances over all engines.

    A worker that dies is replaced, and its jobs are asked again under the same request ids; one that stands still is
    killed. Engines are supervised while groups are waited for; workers hear of those that have come back.
    """

    def __init__(self, config: RunConfig, engines: EngineGroup) -> None:
        self._config = config
        self._timeout = config.rollout.request_timeout_seconds * 2
        self._start_seconds = config.placement.start_timeout_seconds
        self._engines, self._supervision = engines, engines.supervision
        self.asked = time.time()
        """When Ray was asked for the workers' processes."""
        self._workers = [self._launch(index) for index in range(config.rollout.workers)]
        self._pulses = [self._pulse(worker) for worker in self._workers]
        self._looked = time.monotonic()
        self._known: list[RemoteEngine | None] = []
        """By engine, what the workers take for it."""
        self._records: dict[Any, _Recording] = {}
        """What is being written."""

    def start(self) -> None:
        """Build the workers; the engines must be up. Raises as `stream` does."""
        self._known = self._engines.remote_engines()
        for index, building in enumerate([self._build(worker) for worker in self._workers]):
            self._restart(index, building)

    def came_up(self) -> list[ProcessStart]:
        """How each worker's process did."""
        refs = [worker.came_up.remote() for worker in self._workers]
        return wait_all(refs, what="start", names=self._names(refs))

    def actors(self) -> dict[str, Any]:
        """Ray actors by their names for people."""
        return {f"rollout worker {index}": worker for index, worker in enumerate(self._workers)}

    def first_completion(self) -> float:
        """See `EngineGroup`."""
        return self._engines.first_completion()

    def stream(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, label: str, seed: tuple[int, ...] = ()
    ) -> Iterator[FinishedGroup]:
        """Groups as they finish; `group_id` is the prompt's place in `prompts`.

        What has not come when the stream ends is given up: the engines may then have other weights.

        Args:
            label: names the requests: `<label>-<group>-<sample>`.
            seed: what the samples' randomness follows from.

        Raises:
            RewardError, WorkerError: as the worker raised it, or a process was lost that may not be restarted; the
                first ends the stream.
        """
        self._tend_engines()
        asked: dict[Any, _Asked] = {}
        for group_id, prompt in enumerate(prompts):
            job = GroupJob(
                prompt=prompt,
                group_id=group_id,
                num_samples=num_samples,
                sampling=sampling,
                request_id=f"{label}-{group_id}",
                seed=seed,
            )
            self._ask(job, group_id % len(self._workers), asked)
        replayed = 0
        try:
            for summary, payload in self._finished(asked, label):
                replayed += summary.replayed
                yield FinishedGroup(summary, payload)
        finally:
            for ref in asked:
                ray.cancel(ref, recursive=False)
        if replayed:
            self._supervision.restarts.say(f"{label}: {replayed} of {len(prompts)} groups are from the journal")

    def _finished(
        self, asked: dict[Any, _Asked], label: str
    ) -> Iterator[tuple[GroupSummary, StoredPayload[list[Trajectory]]]]:
        """The groups of `asked`, which are taken out as they finish; raises as `stream` does."""
        patience = _Patience(self._timeout)
        while asked:
            done = self._wait(asked)
            if self._tend_engines():
                patience.renew()
            if not done and patience.is_over:
                raise WorkerError(f"{label}: {len(asked)} groups were not done after {self._timeout:g} s")
            for summary in done:
                patience.renew()
                if self._has_died(summary):
                    self._replace_worker(asked[summary].worker, summary, asked)
                    break
                raise_failure(summary, what="rollout", name=f"rollout worker {asked[summary].worker}")
                yield ray.get(summary), StoredPayload(asked.pop(summary).payload)

    def _ask(self, job: GroupJob, worker: int, asked: dict[Any, _Asked]) -> None:
        summary, payload = self._workers[worker].invoke.options(num_returns=2).remote("rollout_group", job)
        asked[summary] = _Asked(job, worker, payload)

    def _wait(self, asked: Mapping[Any, _Asked]) -> list[Any]:
        """One of them that is done; none after a while, or when an engine has something to tell."""
        done, _ = ray.wait([*asked, *self._supervision.refs()], num_returns=1, timeout=LOOK_SECONDS)
        found = [ref for ref in done if ref in asked]
        if not found or time.monotonic() - self._looked > LOOK_SECONDS:
            self._look_after({each.worker for each in asked.values()})
        return found

    def _wait_for(self, ref: Any, worker: int) -> None:
        """Until this call to the worker is over, well or not."""
        while not ray.wait([ref], timeout=LOOK_SECONDS)[0]:
            self._look_after({worker})

    def _look_after(self, workers: Iterable[int]) -> None:
        """Kill those of the workers that stand still, so that their calls end; raises as a `deadline` does."""
        self._looked = time.monotonic()
        check_deadline(sorted(f"rollout worker {index}" for index in workers))
        for index in workers:
            if self._pulses[index].stands_still():
                seconds = self._config.recovery.engine_stall_seconds
                self._supervision.restarts.say(
                    f"rollout worker {index} has given no sign of life for {seconds:g} s "
                    "(recovery.engine_stall_seconds); killing it"
                )
                ray.kill(self._workers[index])
                self._pulses[index] = self._pulse(self._workers[index])  # its death takes a while to be known

    def _tend_engines(self) -> bool:
        """Look after the engines, and tell the workers of those lost or come back; whether there were, or none serves.

        Raises as `Supervision.tend` does.
        """
        self._supervision.tend()
        changed = False
        for number, engine in enumerate(self._engines.remote_engines()):
            if engine == self._known[number]:
                continue
            self._known[number] = engine
            changed = True
            lost = LostEngineError(f"{self._engines.name(number)} was lost")
            for worker in self._workers:
                if engine is None:
                    worker.invoke.remote("lose_engine", number, lost)
                else:
                    worker.invoke.remote("replace_engine", number, engine)
        return changed or not self._supervision.serving

    def _replace_worker(self, index: int, failed: Any, asked: dict[Any, _Asked]) -> None:
        """Start a worker anew that has died, which the call `failed` tells, and ask it for what the old one had."""
        self._restart(index, failed)
        for ref, old in list(asked.items()):
            if old.worker == index:
                del asked[ref]
                self._ask(old.job, index, asked)

    def _restart(self, index: int, call: Any) -> None:
        """Start a worker anew where `call` has ended with its process, until one is built; raises what else it raised.

        Raises:
            WorkerError: it may not be restarted.
        """
        name, restarts = f"rollout worker {index}", self._supervision.restarts
        while True:
            try:
                wait_any([call], what="rollout worker start", names={call: name}, timeout=self._start_seconds)
            except WorkerError:
                ray.kill(self._workers[index])  # or it would be taken for built
                raise
            try:
                ray.get(call)
            except DEATHS as error:
                cause = translate(error, what="rollout", name=name)
                time.sleep(restarts.take("rollout worker", cause, restarts.step, who=name))
            except RayError as error:
                raise translate(error, what="rollout worker start", name=name) from error
            else:
                return
            ray.kill(self._workers[index])  # where Ray has but lost sight of it
            self._workers[index] = self._launch(index)
            self._pulses[index] = self._pulse(self._workers[index])
            call = self._build(self._workers[index])

    def _launch(self, index: int) -> Any:
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        nodes = light_nodes()
        here = NodeAffinitySchedulingStrategy(nodes[index % len(nodes)].id, soft=False)
        actor = ray.remote(concurrency_groups={SIGNS: 1})(AsyncShell)
        options = actor.options(num_cpus=0, max_restarts=0, max_concurrency=10_000, scheduling_strategy=here)
        worker = options.remote(environment)
        worker.expect.remote(RolloutProcess, time.time())  # it imports for seconds, while engines start
        return worker

    def _pulse(self, worker: Any) -> WorkerPulse:
        return WorkerPulse(worker, self._config.recovery.engine_stall_seconds)

    def _build(self, worker: Any) -> Any:
        return worker.build.remote(RolloutProcess, (self._config, self._known), {}, time.time())

    def collect(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, label: str, seed: tuple[int, ...] = ()
    ) -> list[FinishedGroup]:
        """All groups, in the order of the prompts."""
        groups = self.stream(prompts, num_samples=num_samples, sampling=sampling, label=label, seed=seed)
        return sorted(groups, key=lambda group: group.summary.group_id)

    def estimate(
        self, job: EstimateJob, groups: Sequence[FinishedGroup]
    ) -> tuple[Findings, dict[Column, StoredPayload[TokenColumn]]]:
        """What `job` finds out of the groups' trajectories; its columns stay where they are."""
        while True:
            call = self._workers[0].invoke.options(num_returns=1 + len(job.gives))
            refs = call.remote("estimate", job, *[group.payload.ref for group in groups])
            found, *columns = refs if job.gives else [refs]
            self._wait_for(found, 0)
            if not self._has_died(found):
                break
            self._restart(0, found)
        (findings,) = wait_all([found], what="estimate", names=self._names([found]))
        return findings, {name: StoredPayload(ref) for name, ref in zip(job.gives, columns, strict=True)}

    def record(self, step: int, groups: Sequence[FinishedGroup], advantages: Sequence[float]) -> None:
        """Have a worker write the step's rollouts to Parquet, while the run goes on."""
        self.finish_records()
        refs = [group.payload.ref for group in groups]
        rewards = [Rewards(t.reward, t.rewards) for group in groups for t in group.summary.trajectories]
        self._record(step % len(self._workers), (step, rewards, list(advantages), *refs))

    def finish_records(self) -> None:
        """Block until what `record` began is on disk."""
        while self._records:
            ref, recording = next(iter(self._records.items()))
            index, name = recording.index, f"rollout worker {recording.index}"
            self._wait_for(ref, index)
            del self._records[ref]
            if not self._has_died(ref):
                raise_failure(ref, what="record rollouts", name=name)
                continue
            if self._workers[index] is recording.worker:
                self._restart(index, ref)
            self._record(index, recording.arguments)

    def _record(self, index: int, arguments: tuple[Any, ...]) -> None:
        worker = self._workers[index]
        self._records[worker.invoke.remote("record", *arguments)] = _Recording(index, worker, arguments)

    def _has_died(self, ref: Any) -> bool:
        """Whether the finished call `ref` has ended with its worker's process."""
        try:
            ray.get(ref)
        except DEATHS:
            return True
        except RayError:
            return False
        return False

    def _names(self, refs: Sequence[Any]) -> dict[Any, str]:
        return {ref: f"rollout worker {i}" for i, ref in enumerate(refs)}


class _Patience:
    """How long nothing may come."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since = seconds, time.monotonic()

    def renew(self) -> None:
        """Something came."""
        self._since = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Nothing came for too long."""
        return time.monotonic() - self._since > self._seconds
