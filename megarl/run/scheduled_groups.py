"""The groups of a run that are in flight or finished, and the batches that its schedule makes of them.

    Schedule (pure)  <-- events --  ScheduledGroups  -- jobs -->  GroupStream (rollout workers)
                                          |
                                          '-- each event, before it has an effect -->  ScheduleLog (disk)

A killed run resumes from a checkpoint and the log: batches that were trained after the checkpoint are read from the
rollout journal and trained again, finished groups are read from it, and unfinished ones are sampled again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megarl.batch.trajectory import Prompt
from megarl.cluster.workers.dispatch import LINGER_SECONDS
from megarl.config import RunConfig
from megarl.data.sampler import RowOrder
from megarl.engines.engine import Sampling
from megarl.rollout.rollout_worker import GroupJob
from megarl.run.remote.rollout_group import FinishedGroup
from megarl.run.run_logs import ScheduleLog
from megarl.run.schedule.events import Admitted, OpenGroup, Outcome, ScheduleState
from megarl.run.schedule.schedule import Schedule, place
from megarl.run.schedule.settings import TokenStaleness, token_staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJobs:
    """Makes the job of any group of a run, the same one each time."""

    config: RunConfig
    prompts: Sequence[Prompt]
    order: RowOrder
    first: int
    """Ordinal, in the order of the prompts, of the schedule's first group; others came before in a warm-up."""
    sampling: Sampling

    def job(self, group: OpenGroup) -> GroupJob:
        """Return the job of a group; ids and seeds are those of the same prompt in a synchronous run.

        A group that is sampled again has another id: the journal may have samples of other weights under the first one.
        """
        algorithm = self.config.algorithm
        step, index = place(group.ordinal, algorithm.prompts_per_step)
        again = f"-again{group.attempt}" if group.attempt else ""
        prompt = self.prompts[self.order.row_at(self.first + group.ordinal)]
        return GroupJob(
            prompt=prompt,
            group_id=index,
            num_samples=algorithm.group_size,
            sampling=self.sampling.within(prompt.max_new_tokens),
            request_id=f"step-{step}{again}-{index}",
            seed=(self.config.seed, step),
            has_baseline=algorithm.needs_greedy_baseline,
        )


Keep = Callable[[FinishedGroup], bool]
"""Whether a step may train on a group; others are removed, and replaced by the next prompts."""

ARRIVAL_SECONDS = LINGER_SECONDS + 0.02
"""How long a push waits for one more finished group, if what it admits depends on how many there are.

A worker returns a group at most `LINGER_SECONDS` after it has finished.
"""

READ_AHEAD = 2
"""Number of logged batches that are read from the journal before they are needed."""

WAIT_GENERATION, WAIT_DEADLINE = "wait_generation", "wait_deadline"
"""Phases in which a step waits for more finished groups, and for those that must be trained before enough others."""


class Stream(Protocol):
    """The methods of `GroupStream` that sample groups."""

    def submit(self, *jobs: GroupJob) -> None:
        """Send the jobs to the workers."""
        ...

    def wait(self, label: str) -> list[tuple[GroupJob, FinishedGroup]]:
        """Return the groups that have finished since the last call; waits for one if there is none."""
        ...

    def take_finished(self, seconds: float) -> list[tuple[GroupJob, FinishedGroup]]:
        """Return the groups that have finished since the last call, until none arrives within `seconds`."""
        ...

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Cancel the jobs with these ids."""
        ...

    def close(self) -> None:
        """Cancel all jobs in flight."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """The groups of a step."""

    groups: list[FinishedGroup]
    """By ascending ordinals."""
    removed: list[FinishedGroup]
    """Groups that failed or were not kept, since the last step."""
    ordinals: tuple[int, ...]
    """One per group."""


class ScheduledGroups:
    """Admits groups to the rollout workers as far as the schedule allows, and takes its batches."""

    def __init__(
        self,
        schedule: Schedule,
        stream: Stream,
        log: ScheduleLog,
        *,
        make_job: Callable[[OpenGroup], GroupJob],
        resumed: bool,
        policy_version: int,
        phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Begin, or resume: read again what the schedule has kept of the run before.

        Args:
            schedule: before its first event since the run began or was resumed.
            make_job: returns the job of an open group, whose request id is in the journal if the group is finished.
            policy_version: version of the last push, as the engines label their tokens.
            phase: times the phases in which a step waits, given their names.
        """
        self.schedule, self._stream, self._log, self._make_job = schedule, stream, log, make_job
        self._phase = phase
        self._ordinals: dict[str, int] = {}
        """By request id, the ordinals of the groups in flight."""
        self._arrived: dict[int, FinishedGroup] = {}
        """By ordinal, the finished groups that were not taken."""
        self._new: set[int] = set()
        """Ordinals of the arrived groups that the filter of the algorithm has not seen."""
        self._admitted: list[Prompt] = []
        """Prompts of the groups that were admitted since the last batch."""
        self._overdue_step: int | None = None
        """Deadline that the current step has waited for, the first one."""
        self._unread = deque(schedule.state().leases)
        """Logged batches whose groups are not being read from the journal yet."""
        schedule.set_label(policy_version)
        if resumed:
            log.write(schedule.resume())
            self._submit(schedule.finished())
        self._step_begin = schedule.state()
        for _ in range(READ_AHEAD):
            self._read_logged_batch()
        self._admit(schedule.capacity)

    def take_prompts(self) -> list[Prompt]:
        """Return the prompts of the groups that were admitted since the last call."""
        prompts, self._admitted = self._admitted, []
        return prompts

    def next_batch(
        self, is_usable: Keep, keep: Keep | None = None, *, max_removed: int | None = None
    ) -> ScheduledBatch:
        """Wait for the batch of the next step, and take it.

        Args:
            is_usable: whether enough completions of a group have rewards; groups that are not usable have failed.
            keep: filter of the algorithm; None: it trains on all usable groups.
            max_removed: with that many removed groups, the step settles for those that are finished.

        Raises:
            RewardError, WorkerError: as the stream raises them.
        """
        removed: list[FinishedGroup] = []
        self._overdue_step = None
        while True:
            ordinals = self._pick(is_usable, keep, removed, max_removed)
            if ordinals is None:
                self._wait_for_groups()
                continue
            missing = set(ordinals).difference(self._arrived)  # being read from the journal
            if not missing:
                break
            while missing:
                missing.difference_update(self._receive())
        self._log.write(self.schedule.lease(ordinals))
        self._read_logged_batch()
        groups = [self._arrived.pop(ordinal) for ordinal in ordinals]
        return ScheduledBatch(groups=groups, removed=removed, ordinals=ordinals)

    def prepare_push(self) -> None:
        """Wait until the weights may be pushed: with `update: drain`, until no group is unfinished.

        Raises:
            OutdatedEngineError: an engine was restarted, whose groups cannot finish before the push.
        """
        while not self.schedule.can_push:
            self._receive()

    def finish_push(self, policy_version: int, *, drained: bool = True) -> None:
        """End the step: its batch is trained, and the engines have its weights. Admits the groups of later steps.

        Args:
            policy_version: what the engines label tokens with from now on. An older one than the step's: the update was
                skipped, and the weights of the step are those of this version.
            drained: False if `prepare_push` has failed.
        """
        event = self.schedule.push(drained=drained, skipped=policy_version < self.schedule.step)
        self._log.write(event)
        if event.dropped:
            self._cancel(set(event.dropped))
        self._step_begin = self.schedule.state()
        if self.schedule.policy.adapt_lookahead and not self.schedule.is_replaying:
            self._mark_finished(self._stream.take_finished(ARRIVAL_SECONDS))  # they arrived during training
        self._admit(self.schedule.capacity)

    def forget_kept(self) -> None:
        """Look again at the finished groups that the filter of the algorithm has kept: rewards have changed."""
        self._new.update(self._arrived)

    def log_retreat(self) -> None:
        """Log that a run which resumes repeats the current step, and samples all groups that are not leased again."""
        event = self.schedule.resume()
        groups = tuple(replace(group.unfinished(), attempt=event.number) for group in self._step_begin.groups)
        self._log.write(replace(event, state=replace(self._step_begin, num_events=event.number, groups=groups)))

    def state(self) -> ScheduleState:
        """Return the state to save with a checkpoint."""
        self._log.begin_file()
        return self.schedule.state()

    def close(self) -> None:
        """Cancel the groups in flight; a resumed run samples them again."""
        self._stream.close()
        self._log.close()

    def oldest_label(self) -> int:
        """Return the oldest policy version whose tokens the current step may train on."""
        return self.schedule.oldest_label

    def staleness(self, tokens_by_label: Mapping[int, int]) -> TokenStaleness:
        """Return the staleness of the tokens of the current step, given their number by policy version."""
        by_version: dict[int, int] = {}
        for label, num in tokens_by_label.items():
            version = self.schedule.version_of(label)
            by_version[version] = by_version.get(version, 0) + num
        return token_staleness(self.schedule.step, by_version, self.schedule.policy.max_staleness)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the leased batch, the open groups, the lookahead, and the deadline that was waited for."""
        overdue = {} if self._overdue_step is None else {"schedule/overdue_step": self._overdue_step}
        return self.schedule.metrics() | {"schedule/lookahead": self.schedule.lookahead} | overdue

    def _admit(self, num: int) -> None:
        if not num:
            return
        event: Admitted = self.schedule.admit(num)
        self._log.write(event)
        jobs = self._submit(self.schedule.open_group(ordinal) for ordinal in event.ordinals)
        self._admitted += [job.prompt for job in jobs]

    def _read_logged_batch(self) -> None:
        """Begin to read the next logged batch from the journal, if there is one."""
        if self._unread:
            self._submit(self._unread.popleft().groups)

    def _submit(self, groups: Iterable[OpenGroup]) -> list[GroupJob]:
        jobs = {group.ordinal: self._make_job(group) for group in groups}
        self._ordinals |= {job.request_id: ordinal for ordinal, job in jobs.items()}
        self._stream.submit(*jobs.values())
        return list(jobs.values())

    def _cancel(self, dropped: AbstractSet[int]) -> None:
        """Forget groups that were dropped, and cancel those in flight."""
        for ordinal in dropped:
            self._arrived.pop(ordinal, None)
        self._new -= dropped
        request_ids = [id_ for id_, ordinal in self._ordinals.items() if ordinal in dropped]
        for request_id in request_ids:
            del self._ordinals[request_id]
        self._stream.cancel(request_ids)

    def _wait_for_groups(self) -> None:
        """Wait for groups as the step cannot take its batch yet; measure for how long and why."""
        self.schedule.mark_waiting()
        name = WAIT_GENERATION
        if self.schedule.num_finished >= self.schedule.groups_per_step:
            name = WAIT_DEADLINE
            self._overdue_step = self._overdue_step or self.schedule.overdue_step
        with self._phase(name):
            self._receive()

    def _receive(self) -> list[int]:
        """Wait for at least one group, and mark those that have finished; return their ordinals."""
        assert self._ordinals, f"step {self.schedule.step} waits for a group, but none is in flight"
        return self._mark_finished(self._stream.wait(f"step-{self.schedule.step}"))

    def _mark_finished(self, groups: Iterable[tuple[GroupJob, FinishedGroup]]) -> list[int]:
        ordinals: list[int] = []
        for job, group in groups:
            ordinal = self._ordinals.pop(job.request_id, None)
            if ordinal is None:
                continue  # it was dropped
            if self.schedule.is_unfinished(ordinal):
                oldest, newest = self._versions(group)
                self._log.write(self.schedule.finish(ordinal, oldest=oldest, newest=newest))
            else:
                assert group.summary.replayed, f"the journal does not have the finished group {job.request_id}"
            self._arrived[ordinal] = group
            ordinals.append(ordinal)
        self._new.update(ordinals)
        return ordinals

    def _versions(self, group: FinishedGroup) -> tuple[int | None, int | None]:
        """Return the versions of the oldest and the newest token of a group; None if it has none."""
        labels = {label for versions in group.summary.column("tokens_by_version") for label, _ in versions}
        if not labels:
            return None, None
        return self.schedule.version_of(min(labels)), self.schedule.version_of(max(labels))

    def _pick(
        self, is_usable: Keep, keep: Keep | None, removed: list[FinishedGroup], max_removed: int | None
    ) -> tuple[int, ...] | None:
        schedule = self.schedule
        if not schedule.is_replaying:
            self._remove_others(is_usable, keep, removed)
        self._admit(schedule.capacity if max_removed is None or len(removed) < max_removed else 0)
        ordinals = schedule.pick()
        if ordinals is None and max_removed is not None and len(removed) >= max_removed:
            return schedule.pick_fewer()
        return ordinals

    def _remove_others(self, is_usable: Keep, keep: Keep | None, removed: list[FinishedGroup]) -> None:
        """Remove the groups that have arrived since the last call, unless they are usable and `keep` returns True."""
        for ordinal in sorted(ordinal for ordinal in self._new if ordinal in self._arrived):  # others were leased
            group = self._arrived[ordinal]
            has_failed = not is_usable(group)
            if has_failed or not (keep is None or keep(group)):
                self._log.write(self.schedule.remove(ordinal, Outcome.FAILED if has_failed else Outcome.FILTERED))
                removed.append(self._arrived.pop(ordinal))
        self._new.clear()
