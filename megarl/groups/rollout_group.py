"""The controller's handle on the rollout workers: sends prompts, yields finished groups, and restarts workers.

Tokens stay in Ray's object store: the controller receives summaries and references.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.batch.pack import ColumnName
from megarl.batch.trajectory import Prompt, Trajectory
from megarl.checkpoint.run_lock import find_claim
from megarl.config import RunConfig
from megarl.errors import LostEngineError, WorkerError
from megarl.groups.engine_group import EngineGroup
from megarl.groups.remote_engine import RemoteEngine
from megarl.groups.rollout_actor import RolloutActor, TrajectoryReward
from megarl.megatron.requests import TokenColumn
from megarl.placement.nodes import nodes_for_light_workers
from megarl.process.startup_trace import StartupTiming
from megarl.rollout.engine import Sampling
from megarl.rollout.rollout_worker import GroupJob, GroupSummary
from megarl.supervision.liveness_probe import LIVENESS_GROUP, POLL_INTERVAL_SECONDS, WorkerLivenessProbe
from megarl.workers.failures import pause, raise_failure, run_abort_check, to_megarl_error, wait_all, wait_any
from megarl.workers.payload import StoredPayload
from megarl.workers.worker_host import AsyncWorkerHost

if TYPE_CHECKING:
    from megarl.groups.estimation import EstimateJob, EstimateSummary

WORKER_DEATHS = (RayActorError, ActorUnschedulableError)
"""Errors of a call to a worker that has died, or whose node was lost before the worker was created."""

SHUTDOWN_SECONDS = 30.0
"""How long workers may take to close their rewards before they are killed."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """The scored samples of one prompt."""

    summary: GroupSummary
    payload: StoredPayload[list[Trajectory]]


@dataclass(frozen=True, slots=True)
class _InFlightJob:
    """A job that a worker is processing."""

    job: GroupJob
    worker: int
    payload: ray.ObjectRef


@dataclass(frozen=True, slots=True)
class _PendingRecord:
    """A call that writes rollouts to disk and has not finished."""

    index: int
    worker: ray.actor.ActorHandle
    arguments: tuple[object, ...]


class RolloutGroup:
    """Distributes prompts over the rollout workers, each of which balances its requests over all engines.

    A worker that dies is replaced, and its jobs are submitted again under the same request ids; a worker that hangs is
    killed. Engines are supervised while the group waits; workers are notified of engines that are lost or restarted.
    """

    def __init__(self, config: RunConfig, engines: EngineGroup) -> None:
        self._config = config
        self._timeout = config.rollout.request_timeout_seconds * 2
        self._start_seconds = config.placement.start_timeout_seconds
        self._engines, self._supervisor = engines, engines.supervisor
        self.requested_at = time.time()
        """Unix time at which the workers' processes were requested from Ray."""
        self._workers = [self._launch(index) for index in range(config.rollout.workers)]
        self._probes = [self._make_probe(worker) for worker in self._workers]
        self._last_check = time.monotonic()
        self._known_engines: list[RemoteEngine | None] = []
        """Handle of each engine that the workers currently use, by replica; None for an engine that does not serve."""
        self._records: dict[ray.ObjectRef, _PendingRecord] = {}
        """Unfinished calls that write rollouts, by Ray reference."""

    def start(self) -> None:
        """Build the workers; the engines must have started. Raises as `stream` does."""
        self._known_engines = self._engines.remote_engines()
        for index, building in enumerate([self._build(worker) for worker in self._workers]):
            self._restart(index, building)

    def startup_timing(self) -> list[StartupTiming]:
        """Return the startup timing of each worker's process."""
        refs = [worker.startup_timing.remote() for worker in self._workers]
        return wait_all(refs, what="start", names=self._names(refs))

    def actors(self) -> dict[str, ray.actor.ActorHandle]:
        """Return the Ray actors by their names in messages."""
        return {f"rollout worker {index}": worker for index, worker in enumerate(self._workers)}

    def first_completion_time(self) -> float:
        """Return the Unix time of the first completion on any engine."""
        return self._engines.first_completion_time()

    def shutdown(self) -> None:
        """Let the workers close their rewards, then kill them. The group must not be used afterwards."""
        refs = [worker.stop.remote() for worker in self._workers]
        ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_SECONDS)
        for worker in self._workers:
            ray.kill(worker)

    def stream(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, label: str, seed: tuple[int, ...] = ()
    ) -> Iterator[FinishedGroup]:
        """Yield groups as they finish; `group_id` is the index of the prompt in `prompts`.

        Groups that are unfinished when the stream is closed are cancelled: by then the engines may have other weights.

        Args:
            label: prefix of the request ids, `<label>-<group>-<sample>`.
            seed: seed of the samples.

        Raises:
            RewardError, WorkerError: as the worker raised it, or a process was lost that must not be restarted; the
                first error ends the stream.
        """
        self._poll_engines()
        in_flight: dict[ray.ObjectRef, _InFlightJob] = {}
        for group_id, prompt in enumerate(prompts):
            job = GroupJob(
                prompt=prompt,
                group_id=group_id,
                num_samples=num_samples,
                sampling=sampling,
                request_id=f"{label}-{group_id}",
                seed=seed,
            )
            self._submit(job, group_id % len(self._workers), in_flight)
        replayed = 0
        try:
            for summary, payload in self._iter_finished(in_flight, label):
                replayed += summary.replayed
                yield FinishedGroup(summary, payload)
        finally:
            for ref in in_flight:
                ray.cancel(ref, recursive=False)
        if replayed:
            self._supervisor.restart_budget.notify(
                f"{label}: replayed {replayed} of {len(prompts)} groups from the journal"
            )

    def _iter_finished(
        self, in_flight: dict[ray.ObjectRef, _InFlightJob], label: str
    ) -> Iterator[tuple[GroupSummary, StoredPayload[list[Trajectory]]]]:
        """Yield the groups of `in_flight` as they finish, and remove them from it; raises as `stream` does."""
        idle = _IdleTimeout(self._timeout)
        while in_flight:
            done = self._wait_any(in_flight)
            if self._poll_engines():
                idle.reset()
            if not done and idle.is_expired:
                raise WorkerError(f"{label}: {len(in_flight)} groups did not finish within {self._timeout:g} s")
            for summary in done:
                idle.reset()
                if self._is_worker_dead(summary):
                    self._replace_worker(in_flight[summary].worker, summary, in_flight)
                    break
                raise_failure(summary, what="rollout", name=f"rollout worker {in_flight[summary].worker}")
                yield ray.get(summary), StoredPayload(in_flight.pop(summary).payload)

    def _submit(self, job: GroupJob, worker: int, in_flight: dict[ray.ObjectRef, _InFlightJob]) -> None:
        summary, payload = self._workers[worker].invoke.options(num_returns=2).remote("rollout_group", job)
        in_flight[summary] = _InFlightJob(job, worker, payload)

    def _wait_any(self, in_flight: Mapping[ray.ObjectRef, _InFlightJob]) -> list[ray.ObjectRef]:
        """Return one finished job in a list; empty after a timeout or if the state of an engine may have changed."""
        done, _ = ray.wait([*in_flight, *self._supervisor.refs()], num_returns=1, timeout=POLL_INTERVAL_SECONDS)
        found = [ref for ref in done if ref in in_flight]
        if not found or time.monotonic() - self._last_check > POLL_INTERVAL_SECONDS:
            self._kill_hung_workers({each.worker for each in in_flight.values()})
        return found

    def _wait_for(self, ref: ray.ObjectRef, worker: int) -> None:
        """Block until this call to the worker has returned or failed."""
        while not ray.wait([ref], timeout=POLL_INTERVAL_SECONDS)[0]:
            self._kill_hung_workers({worker})

    def _kill_hung_workers(self, workers: Iterable[int]) -> None:
        """Kill the workers that hang, so that their calls end; raises as `run_abort_check` does."""
        self._last_check = time.monotonic()
        run_abort_check(sorted(f"rollout worker {index}" for index in workers))
        for index in workers:
            if self._probes[index].is_hung():
                seconds = self._config.recovery.engine_stall_seconds
                self._supervisor.restart_budget.notify(
                    f"rollout worker {index} has not answered a ping for {seconds:g} s "
                    "(recovery.engine_stall_seconds); killing it"
                )
                ray.kill(self._workers[index])
                self._probes[index] = self._make_probe(self._workers[index])  # its death is reported with a delay

    def _poll_engines(self) -> bool:
        """Poll the engines and notify the workers of those that were lost or restarted.

        Returns whether an engine was lost or restarted, or none serves. Raises as `EngineSupervisor.poll` does.
        """
        self._supervisor.poll()
        changed = False
        for number, engine in enumerate(self._engines.remote_engines()):
            if engine == self._known_engines[number]:
                continue
            self._known_engines[number] = engine
            changed = True
            lost = LostEngineError(f"{self._engines.name(number)} was lost")
            for worker in self._workers:
                if engine is None:
                    worker.invoke.remote("mark_engine_lost", number, lost)
                else:
                    worker.invoke.remote("replace_engine", number, engine)
        return changed or not self._supervisor.serving

    def _replace_worker(self, index: int, failed: ray.ObjectRef, in_flight: dict[ray.ObjectRef, _InFlightJob]) -> None:
        """Restart a worker whose death the call `failed` has reported, and submit its jobs to the new one."""
        self._restart(index, failed)
        for ref, old in list(in_flight.items()):
            if old.worker == index:
                del in_flight[ref]
                self._submit(old.job, index, in_flight)

    def _restart(self, index: int, call: ray.ObjectRef) -> None:
        """Wait for `call`, and restart the worker as long as calls fail because of its death.

        Raises:
            MegarlError: `call` failed for another reason.
            WorkerError: the worker must not be restarted, or did not start in time.
        """
        name, restart_budget = f"rollout worker {index}", self._supervisor.restart_budget
        while True:
            try:
                wait_any([call], what="rollout worker start", names={call: name}, timeout=self._start_seconds)
            except WorkerError:
                ray.kill(self._workers[index])  # otherwise it would later pass as built
                raise
            try:
                ray.get(call)
            except WORKER_DEATHS as error:
                cause = to_megarl_error(error, what="rollout", name=name)
                pause(restart_budget.spend("rollout worker", cause, restart_budget.step, worker=name))
            except RayError as error:
                raise to_megarl_error(error, what="rollout worker start", name=name) from error
            else:
                return
            ray.kill(self._workers[index])  # Ray may only have lost contact with it
            self._workers[index] = self._launch(index)
            self._probes[index] = self._make_probe(self._workers[index])
            call = self._build(self._workers[index])

    def _launch(self, index: int) -> ray.actor.ActorHandle:
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        nodes = nodes_for_light_workers()
        here = NodeAffinitySchedulingStrategy(nodes[index % len(nodes)].id, soft=False)
        actor = ray.remote(concurrency_groups={LIVENESS_GROUP: 1})(AsyncWorkerHost)
        options = actor.options(num_cpus=0, max_restarts=0, max_concurrency=10_000, scheduling_strategy=here)
        worker = options.remote(environment)
        worker.preimport.remote(
            RolloutActor, time.time()
        )  # imports take seconds and overlap with the start of the engines
        return worker

    def _make_probe(self, worker: ray.actor.ActorHandle) -> WorkerLivenessProbe:
        return WorkerLivenessProbe(worker, self._config.recovery.engine_stall_seconds)

    def _build(self, worker: ray.actor.ActorHandle) -> ray.ObjectRef:
        arguments = self._config, self._known_engines, find_claim(self._config.run_dir)
        return worker.build.remote(RolloutActor, arguments, {}, time.time())

    def collect(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, label: str, seed: tuple[int, ...] = ()
    ) -> list[FinishedGroup]:
        """Sample like `stream` and return all groups, in the order of the prompts."""
        groups = self.stream(prompts, num_samples=num_samples, sampling=sampling, label=label, seed=seed)
        return sorted(groups, key=lambda group: group.summary.group_id)

    def estimate(
        self, job: EstimateJob, groups: Sequence[FinishedGroup]
    ) -> tuple[EstimateSummary, dict[ColumnName, StoredPayload[TokenColumn]]]:
        """Run `job` on the trajectories of the groups in a worker; its columns stay in the object store."""
        while True:
            call = self._workers[0].invoke.options(num_returns=1 + len(job.outputs))
            refs = call.remote("estimate", job, *[group.payload.ref for group in groups])
            summary_ref, *columns = refs if job.outputs else [refs]
            self._wait_for(summary_ref, 0)
            if not self._is_worker_dead(summary_ref):
                break
            self._restart(0, summary_ref)
        (summary,) = wait_all([summary_ref], what="estimate", names=self._names([summary_ref]))
        return summary, {name: StoredPayload(ref) for name, ref in zip(job.outputs, columns, strict=True)}

    def record(self, step: int, groups: Sequence[FinishedGroup], advantages: Sequence[float | None]) -> None:
        """Begin to write the step's rollouts to Parquet in a worker; blocks until the previous ones are on disk.

        Args:
            step: number of the step.
            groups: the step's groups, with dropped completions.
            advantages: one per completion; None for one that was not trained on.
        """
        self.flush_records()
        refs = [group.payload.ref for group in groups]
        rewards = [TrajectoryReward(t.reward, t.rewards) for group in groups for t in group.summary.trajectories]
        self._record(step % len(self._workers), (step, rewards, list(advantages), *refs))

    def flush_records(self) -> None:
        """Block until the rollouts of all `record` calls are on disk."""
        while self._records:
            ref, recording = next(iter(self._records.items()))
            index, name = recording.index, f"rollout worker {recording.index}"
            self._wait_for(ref, index)
            del self._records[ref]
            if not self._is_worker_dead(ref):
                raise_failure(ref, what="record rollouts", name=name)
                continue
            if self._workers[index] is recording.worker:
                self._restart(index, ref)
            self._record(index, recording.arguments)

    def _record(self, index: int, arguments: tuple[object, ...]) -> None:
        worker = self._workers[index]
        self._records[worker.invoke.remote("record", *arguments)] = _PendingRecord(index, worker, arguments)

    def _is_worker_dead(self, ref: ray.ObjectRef) -> bool:
        """Return whether the finished call `ref` failed because its worker's process died."""
        try:
            ray.get(ref)
        except WORKER_DEATHS:
            return True
        except RayError:
            return False
        return False

    def _names(self, refs: Sequence[ray.ObjectRef]) -> dict[ray.ObjectRef, str]:
        return {ref: f"rollout worker {i}" for i, ref in enumerate(refs)}


class _IdleTimeout:
    """Longest time without progress."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since = seconds, time.monotonic()

    def reset(self) -> None:
        """Restart the timeout after progress."""
        self._since = time.monotonic()

    @property
    def is_expired(self) -> bool:
        """Whether the timeout has passed without progress."""
        return time.monotonic() - self._since > self._seconds
