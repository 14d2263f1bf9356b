"""The controller's handle on the rollout workers: groups of samples in flight and finished, estimates and records.

Tokens stay in Ray's object store: the controller receives summaries and references.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain, repeat
from math import ceil
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from megarl.batch.pack import ColumnName
from megarl.batch.packed_trajectories import with_values
from megarl.batch.trajectory import Prompt, Trajectory
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.process.process_start import StartupTiming
from megarl.cluster.workers.dispatch import StoredItem, as_arguments, distinct_refs
from megarl.cluster.workers.failures import Completions, raise_failure, to_megarl_error
from megarl.cluster.workers.worker_host import CollectedCalls
from megarl.config import RunConfig
from megarl.engines.engine import Sampling
from megarl.errors import MegarlError
from megarl.megatron.request_samples import ComputedColumn
from megarl.rollout.rollout_worker import SUMMARY_POSITIONS, GroupJob, GroupSummary
from megarl.run.remote.engine_group import EngineGroup
from megarl.run.remote.rollout_workers import WORKER_DEATHS, AssignedJob, RolloutWorkers
from megarl.run.supervision.engine_supervisor import GATHER_SECONDS, POLL_INTERVAL_SECONDS

if TYPE_CHECKING:
    from megarl.rollout.estimate_job import EstimateJob, EstimateSummary


MAX_GROUPS_PER_OBJECT = 8
"""Largest number of groups that return as one object."""

SILENCE_SECONDS = 600.0
"""Time without a finished group after which `wait` reports that it still waits, and again after twice the time."""

MAX_OBJECTS_PER_CALL = 16
"""Largest number of objects that return in one call, which costs several times as much as an object."""


def groups_per_object(config: RunConfig) -> int:
    """Return the largest number of groups of an object: a replica needs at least four in each of its mini-batches.

    Replicas train on whole objects, as far as these can be balanced, and fetch little that they do not train on.
    """
    dp = RankGrid.of(config.trainer.parallel, config.placement.slots).dp
    per_replica = config.algorithm.prompts_per_step // (config.algorithm.num_mini_batches * dp)
    return max(1, min(MAX_GROUPS_PER_OBJECT, per_replica // 4))


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """The scored samples of one prompt."""

    summary: GroupSummary
    payload: StoredItem[Sequence[Trajectory]]
    """Groups that a worker has returned together share an object, which is freed after the last of them."""
    worker: int = 0
    """Index of that worker, on whose node the object is."""


@dataclass(frozen=True, slots=True)
class _JobBatch:
    """Jobs that were sent to a worker together."""

    number: int
    """Unique in this process."""
    worker: int
    actor: ray.actor.ActorHandle
    """The worker's actor when the jobs were sent; it may have been restarted since."""
    jobs: dict[int, AssignedJob]
    """Unfinished jobs by their index among those that were sent."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that returns finished jobs of a batch."""

    batch: _JobBatch
    per_object: int
    """Largest number of groups of an object."""
    objects: Sequence[ray.ObjectRef]
    """References to its groups."""


_batch_numbers = itertools.count()


class GroupStream:
    """Sends jobs to the rollout workers and returns the groups as they finish.

    Each job names an engine, as only the stream sees the groups of all workers. The jobs of a worker that dies are
    submitted again under the same request ids; a worker that hangs is killed. Engines are supervised while the stream
    waits.

    Jobs that are submitted together reach a worker in one call, and groups that finish together return in one: a call
    for each group would be most of the controller's work. A call has objects for twice as many groups as the call
    before it has returned, or for as many as had finished by then.
    """

    def __init__(self, workers: RolloutWorkers, max_per_object: int = MAX_GROUPS_PER_OBJECT) -> None:
        """Create a stream without groups.

        Args:
            max_per_object: largest number of groups that return as one object.
        """
        self._workers, self._max_per_object = workers, max_per_object
        self._calls: dict[ray.ObjectRef, _Call] = {}
        """The call in progress of each batch, by the reference to its summaries."""
        self._completions = Completions()
        self._ended: deque[tuple[ray.ObjectRef, Future[Any]]] = deque()
        """Calls that have ended and were not looked at: groups are returned before the error of a later call."""
        self._error: MegarlError | None = None
        """Error of a group that ended in one call with groups that were returned before it."""
        self._watched: set[ray.ObjectRef] = set()
        """References of the engines' supervisor that wake up `wait`."""
        self._next_check = time.monotonic()

    def __len__(self) -> int:
        """Number of groups in flight."""
        return sum(len(call.batch.jobs) for call in self._calls.values())

    def __bool__(self) -> bool:
        """Whether groups are in flight."""
        return bool(self._calls)

    def submit(self, *jobs: GroupJob) -> None:
        """Send the jobs to the workers of the least loaded engines, blocks of adjacent ones together.

        A block has at most as many jobs as an object, and fewer so that all workers get equally many.
        """
        for worker, assigned in self._workers.engine_loads.assign(jobs, self._max_per_object).items():
            self._send(assigned, worker)

    def wait(self, label: str) -> list[tuple[GroupJob, FinishedGroup]]:
        """Return the groups that have finished since the last call, with their jobs; waits for one of those in flight.

        It has no time limit of its own: a worker ends each group, one that hangs is killed, and the phase of the step
        has a limit, `recovery.phase_timeout_seconds`.

        Args:
            label: of the groups, in the message that none of them finishes.

        Raises:
            RewardError, WorkerError: as the worker raised it, or a process was lost that must not be restarted.
        """
        begun, silence = time.monotonic(), SILENCE_SECONDS
        finished: list[tuple[GroupJob, FinishedGroup]] = []
        while self._calls or self._error is not None:
            if self._error is not None:
                raise self._error
            ended = self._completions.wait(0.0 if self._ended else POLL_INTERVAL_SECONDS)
            self._ended += ended
            if time.monotonic() >= self._next_check or any(ref in self._watched for ref, _ in ended):
                self._supervise()
            while self._ended and self._error is None and not (finished and self._ended[0][1].exception()):
                finished += self._take(*self._ended.popleft())
            if finished:
                break
            if time.monotonic() - begun > silence:
                self._workers.restart_budget.notify(
                    f"{label}: none of {len(self)} groups in flight has finished for {silence:g} s; still waiting"
                )
                silence *= 2
        return finished

    def take_finished(self, seconds: float) -> list[tuple[GroupJob, FinishedGroup]]:
        """Return the groups that have finished since the last call, with their jobs, until none arrives in time.

        The error of a group is raised by the next `wait`.

        Args:
            seconds: how long to wait for the next ones; four times as long for all.
        """
        finished: list[tuple[GroupJob, FinishedGroup]] = []
        end = time.monotonic() + 4 * seconds
        while self._calls and self._error is None:
            left = max(0.0, end - time.monotonic())
            self._ended += self._completions.wait(0.0 if self._ended else min(seconds, left))
            if not self._ended or self._ended[0][1].exception():
                break
            finished += self._take(*self._ended.popleft())
        return finished

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Cancel the jobs in flight with these ids; `wait` does not return them."""
        wanted = set(request_ids)
        for ref, batch in [(ref, call.batch) for ref, call in self._calls.items()]:
            indices = [index for index, assigned in batch.jobs.items() if assigned.job.request_id in wanted]
            if indices:
                batch.actor.cancel_calls.remote(str(batch.number), indices)
            for index in indices:
                self._remove(batch, index)
            if not batch.jobs:
                del self._calls[ref]

    def close(self) -> None:
        """Cancel the groups in flight."""
        self.cancel([each.job.request_id for call in self._calls.values() for each in call.batch.jobs.values()])

    def _remove(self, batch: _JobBatch, index: int) -> GroupJob:
        """Return a job that is no longer in flight, and remove it."""
        assigned = batch.jobs.pop(index)
        self._workers.engine_loads.release(assigned)
        return assigned.job

    def _send(self, assigned: Sequence[AssignedJob], worker: int) -> None:
        batch = _JobBatch(next(_batch_numbers), worker, self._workers[worker], dict(enumerate(assigned)))
        jobs = [each.job if each.load is None else with_values(each.job, engine=each.load.engine) for each in assigned]
        self._call(batch, "begin_calls", ("rollout_group", tuple(jobs)), num_expected=1)

    def _call(self, batch: _JobBatch, name: str, arguments: tuple[Any, ...], *, num_expected: int) -> None:
        """Call a method of the worker's process that returns finished jobs of the batch.

        Args:
            num_expected: number of jobs for which the call has objects, if not fewer are left.
        """
        per_object = min(len(batch.jobs), self._max_per_object)
        num_objects = min(MAX_OBJECTS_PER_CALL, ceil(min(num_expected, len(batch.jobs)) / per_object))
        call = getattr(batch.actor, name).options(num_returns=1 + num_objects)
        summaries, *objects = call.remote(str(batch.number), *arguments, per_object, num_objects)
        self._calls[summaries] = _Call(batch, per_object, objects)
        self._completions.add(summaries)

    def _take(self, ref: ray.ObjectRef, ended: Future[Any]) -> list[tuple[GroupJob, FinishedGroup]]:
        """Return the finished groups of a call; none if its worker has died, whose jobs are then submitted again."""
        if ref not in self._calls:
            return []  # an engine's, or one whose jobs were canceled, or submitted again as its worker had died
        call = self._calls[ref]
        batch, per_object = call.batch, call.per_object
        try:
            collected: CollectedCalls = ended.result()
        except WORKER_DEATHS:
            self._restart_dead(ref)
            return []
        except RayError as error:
            raise to_megarl_error(error, what="rollout", name=f"rollout worker {batch.worker}") from error
        finished: list[tuple[GroupJob, FinishedGroup]] = []
        released: list[AssignedJob] = []
        for position, (index, outcome) in enumerate(collected.results):
            if index not in batch.jobs:
                continue  # it was canceled
            if isinstance(outcome, MegarlError):
                self._error = outcome
                break
            payload: StoredItem[Any] = StoredItem(call.objects[position // per_object], position % per_object)
            released.append(batch.jobs.pop(index))
            finished.append((released[-1].job, FinishedGroup(outcome, payload, batch.worker)))
        self._workers.engine_loads.release(*released)
        if self._error is not None:
            return finished
        del self._calls[ref]
        if batch.jobs:
            num_expected = max(collected.num_ready, 2 * len(collected.results), 1)
            self._call(batch, "collect_calls", (), num_expected=num_expected)
        return finished

    def _restart_dead(self, reported: ray.ObjectRef) -> None:
        """Restart the worker whose death a call has reported, and those that died with it; submit their jobs again."""
        deadline = time.monotonic() + GATHER_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            self._ended += self._completions.wait(left)
        deaths = [reported, *(ref for ref, ended in self._ended if isinstance(ended.exception(), WORKER_DEATHS))]
        batches = {ref: self._calls[ref].batch for ref in deaths if ref in self._calls}
        actors = {batch.actor for batch in batches.values()}
        lost = {ref: call.batch for ref, call in self._calls.items() if call.batch.actor in actors}
        jobs: dict[int, list[GroupJob]] = {}
        for ref, batch in lost.items():
            del self._calls[ref]
            jobs.setdefault(batch.worker, []).extend(
                replace(job, num_resent=job.num_resent + 1)
                for job in [self._remove(batch, index) for index in list(batch.jobs)]
            )
        self._workers.abort_groups([job.request_id for own in jobs.values() for job in own])
        self._workers.restart(
            {batch.worker: ref for ref, batch in batches.items() if self._workers[batch.worker] is batch.actor}
        )
        for worker, own in jobs.items():
            self._send(self._workers.engine_loads.assign_to(worker, own), worker)

    def _supervise(self) -> None:
        """Check engines and workers."""
        self._workers.poll_engines()
        refs = set(self._workers.engine_refs())
        for ref in refs - self._watched:
            self._completions.add(ref)
        self._watched = refs
        self._workers.kill_hung({call.batch.worker for call in self._calls.values()})
        self._next_check = time.monotonic() + POLL_INTERVAL_SECONDS


@dataclass(frozen=True, slots=True)
class _PendingRecord:
    """A call that writes rollouts to disk and has not finished."""

    index: int
    worker: ray.actor.ActorHandle
    arguments: tuple[object, ...]


AWAITED = 1
"""Priority of groups that the run waits for, as those of an evaluation; groups of an open stream have 0."""


class RolloutGroup:
    """Distributes prompts over the rollout workers and engines."""

    def __init__(
        self,
        config: RunConfig,
        engines: EngineGroup | None,
        workers: RolloutWorkers | None = None,
        *,
        max_per_object: int | None = None,
    ) -> None:
        """Args:
        engines: None: `workers` read all groups from a journal.
        workers: their processes; None: request them.
        max_per_object: largest number of groups that return as one object; None: `groups_per_object`.
        """
        self.max_per_object = max_per_object or groups_per_object(config)
        """Largest number of groups that return as one object."""
        if workers is None:
            assert engines is not None, "workers without engines are those of a replay"
            workers = RolloutWorkers(config, engines, engines.supervisor.restart_budget)
        self._engines = engines
        self.workers = workers
        """The workers' processes."""
        self._records: dict[ray.ObjectRef, _PendingRecord] = {}
        """Unfinished calls that write rollouts, by Ray reference."""

    @property
    def requested_at(self) -> float:
        """Unix time at which the workers' processes were requested from Ray."""
        return self.workers.requested_at

    def start(self) -> None:
        """Build the workers; the engines must have started. Raises as `stream` does."""
        self.workers.start()

    def startup_timing(self) -> list[StartupTiming]:
        """Return the startup timing of each worker's process."""
        return self.workers.startup_timing()

    def actors(self) -> dict[str, ray.actor.ActorHandle]:
        """Return the Ray actors by their names in messages."""
        return self.workers.actors()

    def first_completion_time(self) -> float:
        """Return the Unix time of the first completion on any engine."""
        assert self._engines is not None
        return self._engines.first_completion_time()

    def shutdown(self) -> None:
        """Let the workers close their rewards, then kill them. The group must not be used afterwards."""
        self.workers.shutdown()

    def open_stream(self) -> GroupStream:
        """Return a stream for groups that stay in flight while others finish, also from step to step."""
        return GroupStream(self.workers, self.max_per_object)

    def pause_clocks(self) -> None:
        """Stop the timeouts of the requests in flight: the engines are paused."""
        self.workers.call_all("pause_clock")

    def resume_clocks(self) -> None:
        """Let the timeouts of the requests in flight continue; no-op if they do."""
        self.workers.call_all("resume_clock")

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
        jobs = [
            GroupJob(
                prompt=prompt,
                group_id=group_id,
                num_samples=num_samples,
                sampling=sampling.within(prompt.max_new_tokens),
                request_id=f"{label}-{group_id}",
                seed=seed,
                priority=AWAITED,
            )
            for group_id, prompt in enumerate(prompts)
        ]
        yield from self._stream(jobs, label)

    def _stream(self, jobs: Sequence[GroupJob], label: str) -> Iterator[FinishedGroup]:
        self.workers.poll_engines()
        groups = self.open_stream()
        groups.submit(*jobs)
        replayed = 0
        try:
            while groups:
                for _, group in groups.wait(label):
                    replayed += group.summary.replayed
                    yield group
        finally:
            groups.close()
        if replayed:
            self.workers.restart_budget.notify(f"{label}: replayed {replayed} of {len(jobs)} groups from the journal")

    def collect(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, label: str, seed: tuple[int, ...] = ()
    ) -> list[FinishedGroup]:
        """Sample like `stream` and return all groups, in the order of the prompts."""
        groups = self.stream(prompts, num_samples=num_samples, sampling=sampling, label=label, seed=seed)
        return sorted(groups, key=lambda group: group.summary.group_id)

    def sample_on_each_engine(
        self, prompt: Prompt, *, sampling: Sampling, label: str, seed: tuple[int, ...]
    ) -> list[FinishedGroup]:
        """Sample one completion on each engine; raises as `stream` does. An engine that is lost has a stand-in."""
        assert self._engines is not None
        jobs = [
            GroupJob(
                prompt=prompt,
                group_id=engine,
                num_samples=1,
                sampling=sampling,
                request_id=f"{label}-{engine}",
                seed=seed,
                engine=engine,
                priority=AWAITED,
            )
            for engine in range(len(self._engines.remote_engines()))
        ]
        return list(self._stream(jobs, label))

    def estimate(
        self, job: EstimateJob, groups: Sequence[FinishedGroup]
    ) -> tuple[EstimateSummary, dict[ColumnName, ComputedColumn]]:
        """Run `job` on the trajectories of the groups, shared by the workers; its columns stay in the object store."""
        # imports torch, which takes seconds
        from megarl.rollout.estimate_job import estimate_in_shares, share_groups

        workers_G = share_groups(job, [group.worker for group in groups], len(self.workers))
        payloads: dict[int, list[StoredItem[Sequence[Trajectory]]]] = {}
        for worker, group in zip(workers_G.tolist(), groups, strict=True):
            payloads.setdefault(worker, []).append(group.payload)
        trajectories = {worker: distinct_refs(own) for worker, own in payloads.items()}

        def call(
            method: str, arguments: Mapping[int, tuple[object, ...]], num_columns: int
        ) -> Mapping[int, tuple[EstimateSummary, Sequence[ray.ObjectRef]]]:
            calls = {}
            for worker, own_arguments in arguments.items():
                stored, places = trajectories[worker]
                calls[worker] = (places, *own_arguments, *as_arguments(stored))
            return self.workers.call_each(method, calls, num_returns=1 + num_columns)

        summary, columns, keys = estimate_in_shares(job, workers_G, call)
        return summary, {name: ComputedColumn.of(refs, keys) for name, refs in columns.items()}

    def record(self, step: int, groups: Sequence[FinishedGroup], advantages: Sequence[float | None]) -> None:
        """Begin to write the step's rollouts to Parquet in a worker; blocks until the previous ones are on disk.

        Args:
            step: number of the step.
            groups: the step's groups, with dropped completions.
            advantages: one per sequence; None for one that was not trained on.
        """
        self.flush_records()
        stored, places = distinct_refs([group.payload for group in groups])
        of_groups = list(zip(*[group.summary.columns for group in groups], strict=True))
        segment_tokens, *rewards = (
            tuple(chain.from_iterable(of_groups[SUMMARY_POSITIONS[name]])) if groups else ()
            for name in ("segment_tokens", "reward", "rewards", "reward_errors")
        )
        if any(segment_tokens):
            sizes = [len(tokens) or 1 for tokens in segment_tokens]
            rewards = [tuple(chain.from_iterable(map(repeat, column, sizes))) for column in rewards]
        self._record(step % len(self.workers), (step, tuple(rewards), tuple(advantages), places, *as_arguments(stored)))

    def flush_records(self) -> None:
        """Block until the rollouts of all `record` calls are on disk."""
        while self._records:
            ref, recording = next(iter(self._records.items()))
            index, name = recording.index, f"rollout worker {recording.index}"
            self.workers.wait_for({ref: index})
            del self._records[ref]
            if not self.workers.is_dead(ref):
                raise_failure(ref, what="record rollouts", name=name)
                continue
            if self.workers[index] is recording.worker:
                self.workers.restart({index: ref})
            self._record(index, recording.arguments)

    def _record(self, index: int, arguments: tuple[object, ...]) -> None:
        worker = self.workers[index]
        self._records[worker.invoke.remote("record", *arguments)] = _PendingRecord(index, worker, arguments)
