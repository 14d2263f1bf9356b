"""CPU time of the events of a schedule, and of the groups of a run that it drives, with many open groups."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import cast

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.cluster.workers.dispatch import StoredItem
from megarl.engines.engine import Sampling
from megarl.rollout.rollout_worker import GroupJob, GroupSummary, TrajectorySummary
from megarl.run.remote.rollout_group import FinishedGroup
from megarl.run.run_logs import ScheduleLog
from megarl.run.schedule.events import OpenGroup
from megarl.run.schedule.schedule import Schedule
from megarl.run.schedule.settings import SchedulePolicy
from megarl.run.scheduled_groups import ScheduledGroups

LOOKAHEAD, MAX_STALENESS = 4, 8
GROUP_SIZE, NUM_TOKENS = 8, 100


def event_microseconds(num_open: int, num_steps: int, *, in_order: bool = False) -> float:
    """Return the CPU time of an event with `num_open` groups open, each followed by a `pick`, in microseconds."""
    schedule, random = _schedule(num_open, in_order=in_order), Random(0)
    unfinished: list[int] = []
    start, num_events = time.thread_time(), 0
    while schedule.version < num_steps:
        while schedule.capacity:
            unfinished += schedule.admit(1).ordinals
            num_events += 1
        random.shuffle(unfinished)
        while (batch := schedule.pick()) is None:
            schedule.finish(unfinished.pop())
            num_events += 1
        schedule.lease(batch)
        schedule.push()
        num_events += 2
    return (time.thread_time() - start) / num_events * 1e6


def group_microseconds(num_open: int, num_steps: int) -> float:
    """Return the CPU time of a group of a run with `num_open` groups open, in microseconds: all that the driver does.

    A group is admitted, received by itself, judged by a filter, leased and pushed; each event is written to the log.
    The stream finishes groups in random order.
    """
    schedule, stream = _schedule(num_open), InstantStream()
    with TemporaryDirectory() as folder:
        log = ScheduleLog(Path(folder))
        groups = ScheduledGroups(schedule, stream, log, make_job=make_job, resumed=False, policy_version=0)
        seconds = 0.0
        while schedule.version < num_steps:
            stream.generate(schedule.version)
            start = time.thread_time()
            groups.next_batch(lambda group: len(group.summary.kept) > 1, lambda group: group.worker == 0)
            groups.prepare_push()
            groups.finish_push(schedule.step)
            seconds += time.thread_time() - start
        groups.close()
    return seconds / (num_steps * schedule.groups_per_step) * 1e6


def make_job(group: OpenGroup) -> GroupJob:
    """Return the job of a group."""
    return GroupJob(
        prompt=_PROMPT,
        group_id=group.ordinal,
        num_samples=GROUP_SIZE,
        sampling=_SAMPLING,
        request_id=f"step-{group.ordinal}-0",
        seed=(0,),
    )


@dataclass(slots=True)
class InstantStream:
    """Has the methods of `GroupStream` that a schedule uses, and finishes one group in each `wait`."""

    jobs: list[GroupJob] = field(default_factory=list)
    """Groups in flight."""
    finished: list[tuple[GroupJob, FinishedGroup]] = field(default_factory=list)
    """The same groups as they will have finished; the last one is next."""

    def submit(self, *jobs: GroupJob) -> None:
        """Begin groups."""
        self.jobs += jobs

    def generate(self, version: int) -> None:
        """Let the groups in flight finish in random order, with tokens of this version."""
        trajectory = replace(_TRAJECTORY, tokens_by_version=((version, NUM_TOKENS),))
        summary = GroupSummary(
            group_id=0,
            prompt_id=_PROMPT.prompt_id,
            trajectories=(trajectory,) * GROUP_SIZE,
            generation_seconds=1.0,
            scoring_seconds=1.0,
        )
        Random(version).shuffle(self.jobs)
        self.finished = [(job, FinishedGroup(summary, _NO_PAYLOAD)) for job in self.jobs]

    def wait(self, label: str) -> list[tuple[GroupJob, FinishedGroup]]:
        """Return a finished group."""
        del label
        self.jobs.pop()
        return [self.finished.pop()]

    def take_finished(self, seconds: float) -> list[tuple[GroupJob, FinishedGroup]]:
        """Return nothing."""
        del seconds
        return []

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget groups."""
        canceled = set(request_ids)
        self.jobs = [job for job in self.jobs if job.request_id not in canceled]

    def close(self) -> None:
        """Forget all groups."""
        self.jobs.clear()


def _schedule(num_open: int, *, in_order: bool = False) -> Schedule:
    policy = SchedulePolicy(lookahead=LOOKAHEAD, max_staleness=MAX_STALENESS, in_order=in_order)
    return Schedule(policy, num_open // (LOOKAHEAD + 1))


_PROMPT = Prompt(prompt_id="p", text="", row={}, token_ids=(1,))
_SAMPLING = Sampling(temperature=1.0, max_new_tokens=NUM_TOKENS)
_TRAJECTORY = TrajectorySummary(
    num_tokens=NUM_TOKENS + 1,
    prompt_length=1,
    response_length=NUM_TOKENS,
    reward=1.0,
    rewards={"match": 1.0},
    finish_reason="stop",
    tokens_by_version=(),
)
_NO_PAYLOAD = cast("StoredItem[Sequence[Trajectory]]", None)
