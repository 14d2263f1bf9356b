"""Rollout workers that finish groups in random order, with tokens of every version since a group was begun.

Finished groups are in the run's real journal, and jobs that it has are answered from it, as by the real workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from megarl.batch.trajectory import Trajectory
from megarl.config import RunConfig
from megarl.groups.group_stream import FinishedGroup
from megarl.rollout.journal.journal import FinishedJob, Journal, open_journal, parse_step
from megarl.rollout.rollout_worker import GroupJob, summarize
from tests.run.finished_groups import finished_group

NUM_TOKENS = 12
"""Sampled tokens of a completion."""


@dataclass
class ScriptedStream:
    """Has the methods of `GroupStream` that a schedule uses."""

    config: RunConfig
    random: Random
    current_version: Callable[[], int]
    """Version that the engines sample with."""
    reward: Callable[[GroupJob, int], float] = lambda job, sample: float(sample)
    """Of a sample of a job."""
    seconds: Callable[[GroupJob], float] | None = None
    """Relative duration of a job; None: all are alike."""
    journal: Journal = field(init=False)
    in_flight: dict[str, tuple[GroupJob, int]] = field(default_factory=dict)
    """By request id, the job and the version at its start."""
    replayed: list[tuple[GroupJob, FinishedGroup]] = field(default_factory=list)
    num_during_training: int = 0
    """Number of groups that finish while the trainer works."""
    num_sampled: int = 0
    """Number of groups that were generated."""
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.journal = open_journal(self.config)

    def submit(self, *jobs: GroupJob) -> None:
        for job in jobs:
            self.begin(job)

    def begin(self, job: GroupJob) -> None:
        step = parse_step(job.request_id)
        assert step is not None
        (entry,) = self.journal.lookup(step, [job])
        if entry is None:
            self.in_flight[job.request_id] = job, self.current_version()
        else:
            group = finished_group(entry.trajectories)
            self.replayed.append((job, replace(group, summary=replace(entry.summary, replayed=True))))

    def wait(self, label: str) -> list[tuple[GroupJob, FinishedGroup]]:
        finished, self.replayed = self.replayed, []
        for _ in range(self.random.randint(0 if finished else 1, max(1, len(self.in_flight) // 3))):
            if self.in_flight:
                finished.append(self.finish(self.choose(sorted(self.in_flight))))
        return finished

    def take_finished(self, seconds: float) -> list[tuple[GroupJob, FinishedGroup]]:
        finished, self.replayed = self.replayed, []
        return finished + [self.finish(request_id) for request_id in sorted(self.in_flight)[: self.num_during_training]]

    def choose(self, request_ids: list[str]) -> str:
        """Return the job that finishes next."""
        if self.seconds is None:
            return self.random.choice(request_ids)
        rates = [1 / self.seconds(self.in_flight[request_id][0]) for request_id in request_ids]
        return self.random.choices(request_ids, rates)[0]

    def finish(self, request_id: str) -> tuple[GroupJob, FinishedGroup]:
        job, first = self.in_flight.pop(request_id)
        step, self.num_sampled = parse_step(request_id), self.num_sampled + 1
        assert step is not None
        versions = np.sort(np.linspace(first, self.current_version(), NUM_TOKENS).round().astype(np.int32))
        group = finished_group([self.sample(job, i, versions) for i in range(job.num_samples + job.has_baseline)])
        summary = replace(
            group.summary, group_id=job.group_id, prompt_id=job.prompt.prompt_id, has_baseline=job.has_baseline
        )
        self.journal.append(step, [FinishedJob(job, summary, group.payload.fetch())])
        return job, replace(group, summary=summary)

    def sample(self, job: GroupJob, sample: int, versions: np.ndarray) -> Trajectory:
        mask = np.array([False, *[True] * NUM_TOKENS])
        return Trajectory(
            prompt_id=job.prompt.prompt_id,
            group_id=job.group_id,
            token_ids=np.arange(len(mask), dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
            policy_versions=np.concatenate([np.array([-1], np.int32), versions]),
            reward=self.reward(job, sample),
            rewards={"match": self.reward(job, sample)},
        )

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self.in_flight[request_id]

    def close(self) -> None:
        self.is_closed = True


def num_tokens(group: FinishedGroup) -> dict[int, int]:
    """Return version -> number of tokens of the group."""
    found: dict[int, int] = {}
    for summary in (summarize(trajectory) for trajectory in group.payload.fetch()):
        for version, num in summary.tokens_by_version:
            found[version] = found.get(version, 0) + num
    return found
