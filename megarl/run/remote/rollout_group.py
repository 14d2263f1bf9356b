"""The controller's handle on the rollout workers: sends prompts, yields finished groups, estimates and records.

Tokens stay in Ray's object store: the controller receives summaries and references.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING

import ray

from megarl.batch.pack import ColumnName
from megarl.batch.trajectory import Prompt, Trajectory
from megarl.cluster.process.startup_trace import StartupTiming
from megarl.cluster.workers.failures import raise_failure
from megarl.cluster.workers.payload import StoredItem, as_arguments, distinct_refs
from megarl.config import RunConfig
from megarl.engines.engine import Sampling
from megarl.megatron.training.samples import ComputedColumn
from megarl.rollout.rollout_worker import SUMMARY_POSITIONS, GroupJob
from megarl.run.remote.engine_group import EngineGroup
from megarl.run.remote.group_stream import FinishedGroup, GroupStream, groups_per_object
from megarl.run.remote.rollout_workers import RolloutWorkers

if TYPE_CHECKING:
    from megarl.rollout.estimation.estimate_job import EstimateJob, EstimateSummary


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
        from megarl.rollout.estimation.estimate_job import estimate_in_shares, share_groups

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
