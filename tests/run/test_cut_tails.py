"""Runs that are killed, and whose files lose their ends before they resume, as after a power failure.

Everything that a resumed run reads together is real: log and journal of the schedule, records of updates, weights of
rewards, metrics. Samples depend on the weights that sampled them, and weights on all batches before.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from megarl.config import RunConfig
from megarl.config.run import TrackingConfig
from megarl.rollout.journal import FinishedJob, journal_folder, parse_step, read_records
from megarl.rollout.rollout_worker import GroupJob
from megarl.run.remote.rollout_group import FinishedGroup
from megarl.run.reward_weights import RewardWeights, request_weights
from megarl.run.run_logs import ScheduleLog, StepUpdate, UpdateLog, batch_hash, log_folder, open_schedule
from megarl.run.schedule.events import OpenGroup, ScheduleState
from megarl.run.scheduled_groups import ScheduledGroups
from megarl.tracking.tracker import ResumedMetrics, Tracker
from tests.run.finished_groups import completion, finished_group, group_job, run_config
from tests.run.test_scheduled_groups import ScriptedStream

B, STEPS, CHECKPOINT, KILL = 2, 6, 2, 4
"""Groups per step, steps, step of the checkpoint, step in which the run is killed."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run resumes from."""

    state: ScheduleState = field(default_factory=ScheduleState)
    version: int = 0
    weights: tuple[str, ...] = ("initial",)
    """Hash of the weights of each version up to the last one."""
    metrics_bytes: int = 0
    reward_weight: float = 1.0
    trained: tuple[str, ...] = ()
    """Prompts that were trained up to it."""


def sampled_tokens(weights: str, prompt_id: str) -> list[int]:
    """Return the two tokens that these weights sample."""
    return list(hashlib.sha256(f"{weights} {prompt_id}".encode()).digest()[:2])


class Stream(ScriptedStream):
    """Samples tokens that depend on the weights of their version; duration and place of a group do not matter."""

    weights: Callable[[int], str]

    def finish(self, request_id: str) -> tuple[GroupJob, FinishedGroup]:
        job, _ = self.in_flight.pop(request_id)
        step, version, self.num_sampled = parse_step(request_id), self.current_version(), self.num_sampled + 1
        assert step is not None
        tokens = np.array([1, *sampled_tokens(self.weights(version), job.prompt.prompt_id)], np.int32)
        versions = np.array([-1, version, version], np.int32)
        sampled = replace(completion([0, 1, 1]), token_ids=tokens, policy_versions=versions)
        group = finished_group([sampled], job.group_id)
        summary = replace(group.summary, prompt_id=job.prompt.prompt_id, generation_seconds=float(tokens[1]))
        self.journal.append(step, [FinishedJob(job, summary, group.payload.fetch())])
        return job, replace(group, summary=summary)


class Run:
    """One process of a run, from a checkpoint."""

    def __init__(self, config: RunConfig, checkpoint: Checkpoint, seed: int) -> None:
        self.config, self.random = config, Random(seed)
        self.version, self.weights = checkpoint.version, list(checkpoint.weights)
        self.stream = Stream(config, self.random, lambda: self.version)
        self.stream.weights = lambda version: self.weights[version]
        schedule, resumed = open_schedule(config, checkpoint.state, self.make_job)
        before = {group.ordinal for group in checkpoint.state.groups if group.is_finished}
        leased = {ordinal for lease in schedule.state().leases for ordinal in lease.ordinals}
        self.has_lost_groups = not before <= leased | {group.ordinal for group in schedule.finished()}
        """Whether groups are sampled again that were finished at the checkpoint, by weights that are gone."""
        self.trained: list[str] = []
        log = ScheduleLog(log_folder(journal_folder(config.run_dir)))
        self.groups = ScheduledGroups(
            schedule, self.stream, log, make_job=self.make_job, resumed=resumed, policy_version=self.version
        )
        self.rewards = RewardWeights(config, {"match": checkpoint.reward_weight})
        self.updates = UpdateLog(config.run_dir, after=schedule.version)
        metrics = ResumedMetrics(step=schedule.version, num_bytes=checkpoint.metrics_bytes)
        tracking = TrackingConfig(tensorboard=False, rollouts=False)
        self.tracker = Tracker(tracking, config.run_dir, notify=print, resumed=metrics)

    def make_job(self, group: OpenGroup) -> GroupJob:
        return group_job(group, B, num_samples=1, max_new_tokens=2)

    def skips(self, step: int) -> bool:
        """Return whether the engines differ from the trainer before the update of the step."""
        return step == 3

    def take(self) -> list[FinishedGroup]:
        self.groups.take_prompts()
        self.rewards.begin_step(self.groups.schedule.step)
        return self.groups.next_batch(lambda group: True).groups

    def train(self, batch: list[FinishedGroup]) -> None:
        """Train on the batch, or skip the update if the engines differ from the trainer."""
        step, groups = self.groups.schedule.step, batch_hash(batch)
        record = self.updates.find(step, groups)
        if record is None:
            record = StepUpdate(step=step, batch=groups, skipped="probe" * self.skips(step))
        self.updates.write(record)
        tokens = [[*t.token_ids.tolist(), *t.policy_versions.tolist()] for g in batch for t in g.payload.fetch()]
        names = [group.summary.prompt_id for group in batch]
        for name, (_, *found, _, version, _) in zip(names, tokens, strict=True):
            assert found == sampled_tokens(self.weights[version], name), f"{name}: sampled by other weights"
        self.trained += names
        content = f"{self.weights[-1]} {names} {tokens} {dict(self.rewards.current)} {record.skipped}"
        self.weights.append(hashlib.sha256(content.encode()).hexdigest()[:16])
        self.groups.prepare_push()
        self.version = step
        self.groups.finish_push(step)
        self.tracker.log({"loss": float(step)}, step=step)

    def checkpoint(self) -> Checkpoint:
        self.updates.begin_file()
        weight = self.rewards.current["match"]
        return Checkpoint(
            self.groups.state(), self.version, tuple(self.weights), self.tracker.num_bytes, weight, tuple(self.trained)
        )

    def run(self, until: int) -> None:
        while self.groups.schedule.version < until:
            self.train(self.take())


def make_config(folder: Path, schedule: dict[str, object]) -> RunConfig:
    sections = {"run_dir": str(folder), "trainer": {"steps": STEPS}, "schedule": schedule}
    return run_config({"prompts_per_step": B, "group_size": 2}, **sections)


def killed_run(config: RunConfig) -> Checkpoint:
    """Run until step `KILL` has its batch, change a weight on the way, and return the checkpoint."""
    run = Run(config, Checkpoint(), 0)
    run.run(CHECKPOINT)
    checkpoint = run.checkpoint()
    request_weights(config.run_dir, {"match": 0.5})
    kill(run)
    return checkpoint


def kill(run: Run) -> None:
    """Run until step `KILL` has its batch."""
    run.run(KILL - 1)
    run.take()
    run.tracker.close()


def record_ends(path: Path) -> list[int]:
    """Return the ends of the complete records of a file, after its beginning."""
    if path.suffix == ".groups":
        return [0, *(record.start + record.length for record in read_records(path)[0])]
    return [0, *itertools.accumulate(map(len, path.read_bytes().splitlines(keepends=True)))]


def cuts(folder: Path, num_records: int = 2, every: int = 1) -> list[tuple[Path, int]]:
    """Return the files of the run, and each length that cuts the last records; `every`: so many bytes, of text."""
    found: list[tuple[Path, int]] = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        ends = record_ends(path)
        step = every * (29 if path.suffix == ".groups" else 1)
        found += [(path.relative_to(folder), n) for n in range(ends[-min(len(ends), num_records + 1)], ends[-1], step)]
    return found


def truncate(path: Path, length: int) -> None:
    if path.exists() and path.stat().st_size > length:
        os.truncate(path, length)


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost is cut here; thousands of fsyncs take minutes."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("schedule", [{"type": "one_step_off"}, {"type": "async", "lookahead": 1, "max_staleness": 2}])
@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_resumes_again_and_again_after_files_have_lost_their_ends(
    tmp_path: Path, schedule: dict[str, object], every: int
) -> None:
    """No prompt is lost or trained twice, and all samples are of weights that the run has had.

    `one_step_off` repeats: it ends with the weights of an undisturbed run, unless groups have to be sampled again whose
    weights are older than the checkpoint.
    """
    template, folder = tmp_path / "template", tmp_path / "run"
    checkpoint = killed_run(make_config(template, schedule))
    config, random = make_config(folder, schedule), Random(every)

    def resume(seed: int, cut: Sequence[tuple[Path, int]]) -> Run:
        for path, length in cut:
            truncate(folder / path, length)
        return Run(config, checkpoint, seed)

    shutil.copytree(template, folder)
    undisturbed = resume(0, ())
    undisturbed.run(STEPS)
    singles = [[cut] for cut in cuts(template, every=every)]
    together = [[random.choice(own) for own in by_file(cuts(template))] for _ in range(len(singles) // 4)]
    for number, first in enumerate(singles + together):
        shutil.rmtree(folder)
        shutil.copytree(template, folder)
        runs = [resume(3 * number, first)]
        for seed in (1, 2):
            kill(runs[-1])
            runs.append(resume(3 * number + seed, random.sample(cuts(folder, 1), seed)))
        runs[-1].run(STEPS)
        trained = [f"p{ordinal}" for ordinal in range(B * STEPS)]
        assert sorted([*checkpoint.trained, *runs[-1].trained]) == sorted(trained), first
        if schedule["type"] == "one_step_off" and not any(run.has_lost_groups for run in runs):
            assert runs[-1].weights == undisturbed.weights, first


def by_file(found: Sequence[tuple[Path, int]]) -> list[list[tuple[Path, int]]]:
    return [list(own) for _, own in itertools.groupby(found, key=lambda cut: cut[0])]
