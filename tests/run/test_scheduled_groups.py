"""Schedules with a scripted stream, a real log and a real journal: batches, ids, kills at any time, filters."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig
from megarl.config.rollout import ScheduleConfig
from megarl.data.sampler import MixtureOrder
from megarl.engines.engine import Sampling
from megarl.errors import DataError, OutdatedEngineError
from megarl.rollout.journal.journal import FinishedJob, Journal, journal_folder, open_journal, parse_step
from megarl.rollout.rollout_worker import GroupJob, summarize
from megarl.run.remote.group_stream import FinishedGroup
from megarl.run.schedule.events import OpenGroup, Outcome, Removed, ScheduleState
from megarl.run.schedule.schedule import Schedule
from megarl.run.schedule.settings import Late, SchedulePolicy, TokenStaleness, token_staleness
from megarl.run.schedule_log import (
    ScheduleLog,
    continues_log,
    first_needed_step,
    last_logged_step,
    list_files,
    log_folder,
    open_schedule,
    read_log,
    remove_events,
)
from megarl.run.scheduled_groups import Keep, ScheduledGroups
from megarl.tracking.phases import PhaseTimer
from tests.errors import expect_error
from tests.run.finished_groups import completion, finished_group, group_job, run_config

B, STEPS = 3, 12
ALL = [f"p{ordinal}" for ordinal in range(B * STEPS)]
"""The prompts of a run, in the order of their admission."""


NUM_TOKENS = 12
"""Sampled tokens of a completion."""

JOB = GroupJob(
    prompt=Prompt(prompt_id="p0", text="", token_ids=(1,), row={}),
    group_id=0,
    num_samples=2,
    sampling=Sampling(temperature=1.0, max_new_tokens=20),
    request_id="step-1-0",
    seed=(0, 1),
)


@dataclass
class ScriptedStream:
    """Has the methods of `GroupStream` that a schedule uses, and finishes groups in random order.

    Their tokens are of every version since the group was begun. Finished groups are in the run's real journal, and jobs
    that it has are answered from it, as by the real workers.
    """

    config: RunConfig
    random: Random
    current_version: Callable[[], int]
    """Version that the engines sample with."""
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
    skipped: frozenset[int] = frozenset()
    """Versions without an update of their own, which label no token."""
    clock: list[float] = field(default_factory=lambda: [0.0])
    """Seconds; each `wait` takes 1."""

    def __post_init__(self) -> None:
        self.journal = open_journal(self.config)

    def submit(self, *jobs: GroupJob) -> None:
        for job in jobs:
            step = parse_step(job.request_id)
            assert step is not None
            (entry,) = self.journal.lookup(step, [job])
            if entry is None:
                self.in_flight[job.request_id] = job, self.current_version()
            else:
                group = finished_group(entry.trajectories)
                self.replayed.append((job, replace(group, summary=replace(entry.summary, replayed=True))))

    def wait(self, label: str) -> list[tuple[GroupJob, FinishedGroup]]:
        assert self.in_flight or self.replayed
        self.clock[0] += 1
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
        last_updates = [max(set(range(version + 1)) - self.skipped) for version in range(self.current_version() + 1)]
        versions = np.array(last_updates, np.int32)[
            np.linspace(first, self.current_version(), NUM_TOKENS).round().astype(int)
        ]
        sampled = completion([0, *[1] * NUM_TOKENS])
        sampled = replace(sampled, policy_versions=np.concatenate([np.array([-1], np.int32), versions]))
        group = finished_group([sampled] * job.num_samples, job.group_id)
        group = replace(group, summary=replace(group.summary, prompt_id=job.prompt.prompt_id))
        self.journal.append(step, [FinishedJob(job, group.summary, group.payload.fetch())])
        return job, group

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self.in_flight[request_id]


def num_tokens(group: FinishedGroup) -> dict[int, int]:
    """Return version -> number of tokens of the group."""
    found: dict[int, int] = {}
    for summary in (summarize(trajectory) for trajectory in group.payload.fetch()):
        for version, num in summary.tokens_by_version:
            found[version] = found.get(version, 0) + num
    return found


class Trainer:
    """Drives a schedule as a run does, and can be killed between any two of its actions."""

    def __init__(self, folder: Path, seed: int, *, skipped: frozenset[int] = frozenset(), **schedule: object) -> None:
        sections = {"run_dir": str(folder), "trainer": {"steps": STEPS}, "schedule": {"type": "async", **schedule}}
        self.config = run_config({"prompts_per_step": B, "group_size": 2}, **sections)
        self.random, self.skipped, self.clock = Random(seed), skipped, [0.0]
        self.label, self.state = 0, ScheduleState()
        self.batches: dict[int, list[str]] = {}
        """Step -> prompts of its batch."""
        self.tokens: dict[int, dict[int, int]] = {}
        """Step -> version -> number of tokens."""
        self.staleness: dict[int, TokenStaleness] = {}
        """By step."""
        self.num_sampled = 0
        self.timer = PhaseTimer(lambda: self.clock[0])
        self.start()

    def make_job(self, group: OpenGroup) -> GroupJob:
        return group_job(group, B, num_samples=2, max_new_tokens=20)

    def start(self) -> None:
        self.stream = ScriptedStream(
            self.config, self.random, lambda: self.label, skipped=self.skipped, clock=self.clock
        )
        schedule, resumed = open_schedule(self.config, self.state, self.make_job)
        self.groups = ScheduledGroups(
            schedule,
            self.stream,
            ScheduleLog(log_folder(journal_folder(self.config.run_dir))),
            make_job=self.make_job,
            resumed=resumed,
            policy_version=self.label,
            phase=self.timer.phase,
        )

    def kill(self, checkpoint: tuple[ScheduleState, int]) -> None:
        """Lose everything that is not on disk, and resume from the checkpoint: its state and policy version."""
        self.num_sampled += self.stream.num_sampled
        state, self.label = checkpoint
        self.state = TypeAdapter(ScheduleState).validate_json(json.dumps(asdict(state)))
        self.start()

    def take(self, keep: Keep | None = None) -> list[FinishedGroup]:
        """Take the batch of the next step."""
        self.groups.take_prompts()
        batch = self.groups.next_batch(lambda group: True, keep, max_removed=None if keep is None else 10 * B)
        step = self.groups.schedule.step
        names = [group.summary.prompt_id for group in batch.groups]
        assert [f"p{ordinal}" for ordinal in batch.ordinals] == names
        # a step that is trained again after a kill has the same batch
        assert self.batches.setdefault(step, names) == names
        self.tokens[step] = {}
        for group in batch.groups:
            for version, num in num_tokens(group).items():
                self.tokens[step][version] = self.tokens[step].get(version, 0) + num
        staleness = self.groups.staleness(self.tokens[step])
        assert self.staleness.setdefault(step, staleness) == staleness
        return batch.groups

    def push(self) -> None:
        step = self.groups.schedule.step
        self.groups.prepare_push()
        if step not in self.skipped:
            self.label = step
        self.groups.finish_push(self.label)

    def run(self, keep: Keep | None = None) -> None:
        while self.groups.schedule.version < STEPS:
            self.take(keep)
            self.push()

    def run_with_kills(self, seed: int, *, p_kill: float, max_kills: int, check: Callable[[], None]) -> int:
        """Run with checkpoints and kills at random times, and `check` after each batch; return the number of kills."""
        random, checkpoint, num_kills = Random(seed), (self.groups.state(), self.label), 0
        while self.groups.schedule.version < STEPS:
            self.take()
            check()
            if num_kills < max_kills and random.random() < p_kill:
                num_kills += 1
                self.kill(checkpoint)
                continue
            self.push()
            if random.random() < 0.4:
                checkpoint = self.groups.state(), self.label
                assert continues_log(self.config, checkpoint[0])
                remove_events(log_folder(journal_folder(self.config.run_dir)), up_to=checkpoint[0].num_events)
        return num_kills


def prompts(trainer: Trainer) -> list[str]:
    return [name for step in sorted(trainer.batches) for name in trainer.batches[step]]


def ordinal_of(name: str) -> int:
    return int(name.removeprefix("p"))


@pytest.mark.parametrize("seed", range(5))
def test_every_group_is_trained_once_and_no_token_is_above_the_cap(tmp_path: Path, seed: int) -> None:
    trainer = Trainer(tmp_path, seed, lookahead=2, max_staleness=3)
    trainer.run()
    assert sorted(prompts(trainer)) == sorted(ALL)
    worst = [step - 1 - min(tokens) for step, tokens in trainer.tokens.items()]
    assert 1 <= max(worst) <= 3
    assert trainer.stream.num_sampled == B * STEPS


@pytest.mark.parametrize(
    ("schedule", "age"), [({"lookahead": 0, "max_staleness": 0}, 0), ({"type": "one_step_off"}, 1)], ids=str
)
def test_batches_are_in_order_and_of_one_version(tmp_path: Path, schedule: dict[str, object], age: int) -> None:
    """Without lookahead they are those of `sync`, and one version older with `one_step_off`."""
    trainer = Trainer(tmp_path, 0, **schedule)
    trainer.run()
    assert prompts(trainer) == ALL
    assert all(set(tokens) == {max(0, step - 1 - age)} for step, tokens in trainer.tokens.items())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "schedule",
    [
        {"lookahead": 2, "max_staleness": 3},
        {"lookahead": 3, "max_staleness": 3, "adapt_lookahead": True},
        {"type": "one_step_off"},
    ],
    ids=str,
)
def test_a_killed_run_trains_the_logged_batches_again(tmp_path: Path, seed: int, schedule: dict[str, object]) -> None:
    trainer, cap = Trainer(tmp_path, seed, **schedule), 1 if schedule.get("type") else 3
    assert trainer.run_with_kills(seed, p_kill=0.3, max_kills=6, check=lambda: None) >= 1
    assert sorted(prompts(trainer)) == sorted(ALL)
    assert max(step - 1 - min(tokens) for step, tokens in trainer.tokens.items()) <= cap
    # each kill loses the groups that are in flight, and no finished one
    assert trainer.num_sampled + trainer.stream.num_sampled == B * STEPS


def test_a_resumed_run_keeps_finished_groups_and_names_others_anew(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 3, lookahead=2, max_staleness=4)
    trainer.take()
    finished = {group.ordinal for group in trainer.groups.schedule.finished()}
    in_flight = set(trainer.stream.in_flight)
    assert in_flight
    trainer.kill((ScheduleState(), 0))
    assert {group.ordinal for group in trainer.groups.schedule.finished()} == finished
    again = set(trainer.stream.in_flight)
    assert len(again) == len(in_flight)
    assert {re.sub(r"-again\d+", "", name) for name in again} == in_flight
    assert not again & in_flight


def test_filtered_groups_are_replaced_one_by_one(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 1, lookahead=1, max_staleness=2)
    trainer.run(keep=lambda group: ordinal_of(group.summary.prompt_id) % 3 > 0)
    trained = prompts(trainer)
    assert len(trained) == B * STEPS == len(set(trained))
    assert not any(ordinal_of(name) % 3 == 0 for name in trained)
    events = list(read_log(log_folder(journal_folder(tmp_path))))
    removed = [event for event in events if isinstance(event, Removed)]
    assert {event.outcome for event in removed} == {Outcome.FILTERED}
    assert all(event.ordinal % 3 == 0 for event in removed)


def test_a_step_settles_for_fewer_groups(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 1, lookahead=1, max_staleness=2)
    batch = trainer.groups.next_batch(lambda _: True, lambda group: group.summary.prompt_id == "p4", max_removed=2 * B)
    assert [group.summary.prompt_id for group in batch.groups] == ["p4"]
    assert len(batch.removed) >= 2 * B
    trainer.push()
    assert len(trainer.stream.in_flight) == 2 * B


def newest_version(label: int, step: int, skipped: frozenset[int]) -> int:
    """Return the newest version before `step` with the weights of a label."""
    return max(v for v in range(label, step) if all(s in skipped for s in range(label + 1, v + 1)))


def check_versions(trainer: Trainer, cap: int) -> None:
    """Check staleness and oldest label of the batch that was taken."""
    step, skipped = trainer.groups.schedule.step, trainer.skipped
    versions = {newest_version(label, step, skipped): num for label, num in trainer.tokens[step].items()}
    assert trainer.staleness[step] == token_staleness(step, versions, cap)
    for label in trainer.tokens[step]:
        is_trained = newest_version(label, step, skipped) >= step - 1 - cap
        assert is_trained == (label >= trainer.groups.oldest_label())


def truncate_log(folder: Path, random: Random) -> None:
    """Lose up to three `finished` events at the end of the log, whose groups are in the journal."""
    (*_, path) = sorted(log_folder(journal_folder(folder)).glob("*.jsonl"))
    lines = path.read_bytes().splitlines(keepends=True)
    for _ in range(random.randint(0, 3)):
        if lines and json.loads(lines[-1])["event"] == "finished":
            lines.pop()
    path.write_bytes(b"".join(lines))


def random_skips(random: Random) -> frozenset[int]:
    """Return steps that skip their updates, up to three in a row."""
    starts = [step for step in range(1, STEPS + 1) if random.random() < 0.3]
    return frozenset(start + i for start in starts for i in range(random.randint(1, 3)))


@pytest.mark.parametrize("seed", range(16))
def test_skipped_updates_and_kills_lose_no_finished_group_and_no_version(tmp_path: Path, seed: int) -> None:
    """Skips in a row, before a checkpoint, between a kill and a push; logs with and without their last events."""
    random = Random(seed)
    cap = random.randint(1, 4)
    schedule = {"lookahead": random.randint(1, cap), "max_staleness": cap}
    trainer = Trainer(tmp_path, seed, skipped=random_skips(random), **schedule)
    checkpoint, num_kills = (trainer.groups.state(), 0), 0

    def kill() -> None:
        truncate_log(tmp_path, random)
        trainer.kill(checkpoint)

    while trainer.groups.schedule.version < STEPS:
        trainer.take()
        check_versions(trainer, cap)
        assert trainer.staleness[trainer.groups.schedule.step].num_masked == 0
        if num_kills < 6 and random.random() < 0.25:
            num_kills += 1
            kill()
            continue
        trainer.push()
        if num_kills < 6 and random.random() < 0.15:
            num_kills += 1
            kill()
        elif random.random() < 0.4:
            checkpoint = trainer.groups.state(), trainer.label
    assert sorted(prompts(trainer)) == sorted(ALL)
    assert trainer.num_sampled + trainer.stream.num_sampled == B * STEPS


@pytest.mark.parametrize("seed", range(6))
def test_one_step_off_with_skips_and_kills_is_as_undisturbed(tmp_path: Path, seed: int) -> None:
    skipped = random_skips(Random(seed))
    runs = [Trainer(tmp_path / name, seed, skipped=skipped, type="one_step_off") for name in ("killed", "undisturbed")]
    assert runs[0].run_with_kills(seed, p_kill=0.4, max_kills=6, check=lambda: None) >= 1
    runs[1].run()
    assert (runs[0].batches, runs[0].tokens, runs[0].staleness) == (runs[1].batches, runs[1].tokens, runs[1].staleness)


@pytest.mark.parametrize("seed", range(6))
def test_a_resumed_run_with_another_cap_and_skipped_updates(tmp_path: Path, seed: int) -> None:
    """Batches that are not replayed keep to the cap of the settings that they were taken with."""
    random = Random(seed)
    trainer = Trainer(tmp_path, seed, skipped=random_skips(random), lookahead=2, max_staleness=3)
    cap, checkpoint = 3, (trainer.groups.state(), 0)
    while trainer.groups.schedule.version < STEPS:
        is_new = not trainer.groups.schedule.is_replaying
        trainer.staleness.clear()  # a smaller cap masks more of a logged batch
        trainer.take()
        check_versions(trainer, cap)
        (staleness,) = trainer.staleness.values()
        assert not (is_new and staleness.num_masked)
        trainer.push()
        if random.random() < 0.3:
            cap = random.randint(0, 4)
            settings = {"type": "async", "lookahead": random.randint(0, cap), "max_staleness": cap}
            trainer.config = trainer.config.model_copy(update={"schedule": ScheduleConfig(**settings)})
            trainer.kill(checkpoint)
        elif random.random() < 0.5:
            checkpoint = trainer.groups.state(), trainer.label
    assert sorted(prompts(trainer)) == sorted(ALL)


@pytest.mark.parametrize("seed", range(4))
def test_a_run_of_a_version_that_did_not_write_skipped_updates_is_resumed(tmp_path: Path, seed: int) -> None:
    trainer = Trainer(tmp_path, seed, skipped=frozenset({3, 4, 7}), lookahead=2, max_staleness=3)
    while trainer.groups.schedule.version < 4:
        trainer.take()
        trainer.push()
    checkpoint = replace(trainer.groups.state(), skipped=()), trainer.label
    while trainer.groups.schedule.version < 8:
        trainer.take()
        trainer.push()
    for path in log_folder(journal_folder(tmp_path)).glob("*.jsonl"):
        path.write_text(re.sub(r',"skipped":(true|false|\[[0-9,]*\])', "", path.read_text()))
    trainer.kill(checkpoint)
    trainer.run()
    assert sorted(prompts(trainer)) == sorted(ALL)
    assert trainer.num_sampled + trainer.stream.num_sampled == B * STEPS


def test_the_filter_looks_once_at_each_group_unless_rewards_change(tmp_path: Path) -> None:
    trainer, seen = Trainer(tmp_path, 1, lookahead=2, max_staleness=3), Counter[str]()

    def keep(group: FinishedGroup) -> bool:
        seen[group.summary.prompt_id] += 1
        return ordinal_of(group.summary.prompt_id) % 4 > 0

    while trainer.groups.schedule.version < STEPS - 2:
        trainer.take(keep)
        trainer.push()
    assert set(seen.values()) == {1}
    waiting = {f"p{group.ordinal}" for group in trainer.groups.schedule.finished()}
    assert waiting
    trainer.groups.forget_kept()
    trainer.run(keep)
    assert {name for name, num in seen.items() if num > 1} == waiting
    assert max(seen.values()) == 2


class ManyGroups:
    """A stream that finishes one of many groups at a time, in the order of their submission."""

    def __init__(self) -> None:
        self.jobs: deque[GroupJob] = deque()
        self.group = finished_group([completion([0, 1])])

    def submit(self, *jobs: GroupJob) -> None:
        self.jobs.extend(jobs)

    def wait(self, label: str) -> list[tuple[GroupJob, FinishedGroup]]:
        return [(self.jobs.popleft(), self.group)]

    def take_finished(self, seconds: float) -> list[tuple[GroupJob, FinishedGroup]]:
        return []

    def cancel(self, request_ids: Iterable[str]) -> None:
        assert not list(request_ids)

    def close(self) -> None:
        self.jobs.clear()


@pytest.mark.parametrize("settings", [{}, {"adapt_lookahead": True}, {"late": Late.DROP}, {"in_order": True}], ids=str)
def test_a_group_costs_as_much_with_many_open_ones(settings: dict[str, Any]) -> None:
    """Counts the lines that run, from the admission to the push."""

    def num_lines(groups_per_step: int) -> float:
        policy = SchedulePolicy(lookahead=3, max_staleness=3, **settings)
        groups = ScheduledGroups(
            Schedule(policy, groups_per_step),
            ManyGroups(),
            ScheduleLog(None),
            make_job=lambda group: replace(JOB, request_id=f"step-{group.ordinal}-0"),
            resumed=False,
            policy_version=0,
        )
        count = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        sys.settrace(trace)
        try:
            for version in (1, 2):
                groups.next_batch(lambda _: True, lambda _: True)
                groups.finish_push(version)
        finally:
            sys.settrace(None)
        return count / groups_per_step

    few, many = num_lines(8), num_lines(256)
    assert many < 1.2 * few


def test_dropped_groups_leave_nothing_behind(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 5, skipped=frozenset({4, 5, 9}), lookahead=1, max_staleness=1, late="drop")
    while trainer.groups.schedule.version < STEPS:
        trainer.take()
        trainer.push()
        assert set(trainer.groups._ordinals) == set(trainer.stream.in_flight)
        assert set(trainer.groups._arrived) == {group.ordinal for group in trainer.groups.schedule.finished()}
        assert len(trainer.groups.schedule.state().skipped) <= 3
    assert trainer.groups.schedule.state().counts.dropped > 0
    assert trainer.groups.schedule.state().skipped == ()
    trainer.stream.in_flight.clear()
    with expect_error(AssertionError, "13", "flight", "waits"):
        trainer.take()


def test_a_late_result_of_a_dropped_group_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tmp_path, 5, lookahead=1, max_staleness=1, late="drop")
    monkeypatch.setattr(trainer.stream, "cancel", lambda request_ids: list(request_ids))  # too late
    trainer.run()
    assert trainer.groups.schedule.state().counts.dropped > 0
    assert len(prompts(trainer)) == len(set(prompts(trainer))) == B * STEPS


def test_waiting_for_generation_and_for_a_deadline_are_measured(tmp_path: Path) -> None:
    """L = eta = 1: one group of version 0 finishes last, and must be trained in step 2."""
    trainer = Trainer(tmp_path, 0, lookahead=1, max_staleness=1)
    order = ["step-1-1", "step-1-2", "step-2-0", "step-2-1", "step-2-2", "step-3-0", "step-3-1", "step-3-2", "step-1-0"]

    def wait(label: str) -> list[tuple[GroupJob, FinishedGroup]]:
        trainer.clock[0] += 1
        return [trainer.stream.finish(order.pop(0))]

    trainer.stream.wait = wait  # type: ignore[method-assign]
    times = []
    for _ in range(2):
        trainer.timer.start_step()
        trainer.take()
        times.append({name: value for name, value in trainer.timer.take().items() if name.startswith("time/wait")})
        assert trainer.groups.metrics().get("schedule/overdue_step") == (None if len(times) == 1 else 2)
        trainer.push()
    first, second = times
    assert first == {"time/wait_generation_seconds": 3.0}
    assert second == {"time/wait_generation_seconds": 3.0, "time/wait_deadline_seconds": 3.0}


def test_one_step_off_waits_for_the_groups_of_its_batch(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 0, type="one_step_off")
    order = ["step-1-0", "step-1-2", "step-2-0", "step-2-1", "step-1-1"]

    def wait(label: str) -> list[tuple[GroupJob, FinishedGroup]]:
        trainer.clock[0] += 1
        return [trainer.stream.finish(order.pop(0))]

    trainer.stream.wait = wait  # type: ignore[method-assign]
    trainer.timer.start_step()
    trainer.take()
    times = trainer.timer.take()
    assert (times["time/wait_generation_seconds"], times["time/wait_deadline_seconds"]) == (3.0, 2.0)


def test_weights_of_a_skipped_update_count_as_those_of_its_step(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 2, skipped=frozenset({3, 4, 5}), lookahead=1, max_staleness=1)
    trainer.run()
    assert sorted(prompts(trainer)) == sorted(ALL)
    assert min(trainer.tokens[7]) >= 2  # steps 3 to 5 have the weights of version 2


def test_groups_above_the_cap_are_dropped_and_their_late_results_ignored(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 5, lookahead=1, max_staleness=1, late="drop")
    trainer.run()
    dropped = trainer.groups.schedule.state().counts.dropped
    assert dropped > 0
    assert len(prompts(trainer)) == len(set(prompts(trainer))) == B * STEPS


def test_a_checkpoint_needs_the_journal_of_its_open_groups() -> None:
    groups = (OpenGroup(ordinal=7, version=1), OpenGroup(ordinal=20, version=3))
    assert first_needed_step(ScheduleState(version=4, next_ordinal=21, groups=groups), B) == 3
    assert first_needed_step(ScheduleState(version=4, next_ordinal=21), B) == 8


def test_a_gap_in_the_log_is_noticed(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 5, lookahead=1, max_staleness=1)
    state = trainer.groups.state()
    for _ in range(3):
        trainer.take()
        trainer.push()
        last = trainer.groups.state()
    remove_events(log_folder(journal_folder(tmp_path)), up_to=last.num_events)
    trainer.take()
    assert continues_log(trainer.config, last)
    assert not continues_log(trainer.config, state)


def test_groups_that_finish_during_training_count_before_others_are_admitted(tmp_path: Path) -> None:
    """With L = 3, a push opens B places; finished groups beyond one batch take them."""
    trainer = Trainer(tmp_path, 6, adapt_lookahead=True)
    trainer.take()
    num_open = len(trainer.stream.in_flight) + trainer.groups.schedule.num_finished
    assert num_open == 3 * B
    trainer.stream.num_during_training = num_open
    trainer.groups.take_prompts()
    trainer.push()
    assert trainer.groups.schedule.num_finished == num_open
    assert trainer.groups.take_prompts() == []
    trainer.stream.num_during_training = 0
    trainer.run()
    assert sorted(prompts(trainer), key=ordinal_of) == ALL


@pytest.mark.parametrize("is_training_slower", [True, False])
def test_the_lookahead_in_effect_is_a_metric(tmp_path: Path, is_training_slower: bool) -> None:
    """The last steps admit nothing, so that fewer groups are open."""
    trainer, lookaheads = Trainer(tmp_path, 6), []
    trainer.stream.num_during_training = 100 if is_training_slower else 0
    trainer.stream.wait = lambda label: [trainer.stream.finish(min(trainer.stream.in_flight))]  # type: ignore[method-assign]
    for _ in range(STEPS - 4):
        trainer.take()
        lookaheads.append(trainer.groups.metrics()["schedule/lookahead"])
        trainer.push()
    assert (max(lookaheads[1:]), min(lookaheads)) == ((2, 1) if is_training_slower else (3, 3))


def test_a_lost_engine_ends_the_wait_for_unfinished_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restarted engine needs the weights that the push waits with."""
    trainer = Trainer(tmp_path, 4, type="one_step_off")
    trainer.take()
    unfinished = len(trainer.stream.in_flight)
    assert unfinished

    def wait(label: str) -> list[tuple[GroupJob, FinishedGroup]]:
        raise OutdatedEngineError("engine 0 was restarted")

    monkeypatch.setattr(trainer.stream, "wait", wait)
    with pytest.raises(OutdatedEngineError):
        trainer.groups.prepare_push()
    with pytest.raises(ValueError, match=f"{unfinished} groups are unfinished"):
        trainer.groups.finish_push(1)
    trainer.label = 1
    trainer.groups.finish_push(1, drained=False)
    monkeypatch.undo()
    trainer.run()
    assert prompts(trainer) == ALL


@pytest.mark.parametrize("seed", range(4))
def test_a_mixture_keeps_its_ratios_at_any_time_and_after_kills(tmp_path: Path, seed: int) -> None:
    """Durations of the sources 1 : 5 : 25. At most (L + 1) * B groups are admitted and not trained."""
    lookahead, ratios, seconds = 3, [0.5, 0.3, 0.2], [1.0, 5.0, 25.0]
    order = MixtureOrder([40, 40, 40], ratios, seed=0, shuffle=True)

    def source_of(name: str) -> int:
        return order.row_at(ordinal_of(name)) // 40

    class MixedTrainer(Trainer):
        def start(self) -> None:
            super().start()
            self.stream.seconds = lambda job: seconds[source_of(job.prompt.prompt_id)]

    def check() -> None:
        trained = [source_of(name) for name in prompts(trainer)]
        for source, ratio in enumerate(ratios):
            assert abs(trained.count(source) - ratio * len(trained)) <= (lookahead + 1) * B

    trainer = MixedTrainer(tmp_path, seed, lookahead=lookahead, max_staleness=4)
    assert trainer.run_with_kills(seed, p_kill=0.5, max_kills=5, check=check) == 5
    assert sorted(prompts(trainer)) == sorted(ALL)


def cut_log(folder: Path, num_events: int) -> None:
    """Remove the last events of the log's last file."""
    path = list_files(log_folder(journal_folder(folder)))[-1]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-num_events]))


def test_a_log_that_lost_its_end_before_a_checkpoint_is_resumed_again_and_again(tmp_path: Path) -> None:
    """A power failure may lose events that the checkpoint has: the first event after it follows a gap."""
    trainer = Trainer(tmp_path, 1, lookahead=1, max_staleness=2)
    for _ in range(2):
        trainer.take()
        trainer.push()
    checkpoint = trainer.groups.state(), trainer.label
    cut_log(tmp_path, 3)
    for _ in range(4):
        trainer.kill(checkpoint)
        trainer.take()
        trainer.push()
    trainer.run()
    assert sorted(prompts(trainer)) == sorted(ALL)
    numbers = [event.number for event in read_log(log_folder(journal_folder(tmp_path)))]
    assert checkpoint[0].num_events not in numbers
    assert checkpoint[0].num_events + 1 in numbers


def test_a_batch_in_a_gap_of_the_log_is_noticed(tmp_path: Path) -> None:
    """A run that resumes from an older checkpoint, before the gap, would miss its groups."""
    trainer = Trainer(tmp_path, 1, lookahead=1, max_staleness=2)
    older = trainer.groups.state()
    trainer.take()
    trainer.push()
    newer = trainer.groups.state()
    cut_log(tmp_path, 4)
    trainer.kill((newer, 1))
    assert continues_log(trainer.config, newer)
    assert not continues_log(trainer.config, older)
    trainer.state = older
    with pytest.raises(DataError, match=rf"^{log_folder(journal_folder(tmp_path))}: .* of a step up to 1 is missing"):
        trainer.start()


def test_a_gap_that_no_resume_closes_names_the_file(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 1, lookahead=1, max_staleness=2)
    trainer.take()
    trainer.push()
    cut_log(tmp_path, 2)
    trainer.groups.state()
    trainer.take()
    path = list_files(log_folder(journal_folder(tmp_path)))[-1]
    with pytest.raises(DataError, match=rf"^{path}: line 1 is event \d+, but \d+ is missing"):
        continues_log(trainer.config, ScheduleState())


def test_files_before_a_checkpoint_are_not_read(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 1, lookahead=1, max_staleness=2)
    for _ in range(3):
        trainer.take()
        trainer.push()
        state = trainer.groups.state()
    trainer.take()
    *before, _ = list_files(log_folder(journal_folder(tmp_path)))
    assert len(before) == 3
    for path in before:
        path.write_text("not an event\n")
    assert next(read_log(path.parent, state.num_events)).number == state.num_events + 1
    trainer.kill((state, trainer.label))
    trainer.run()
    assert sorted(prompts(trainer)) == sorted(ALL)
    assert last_logged_step(tmp_path) == STEPS


def test_what_groups_batches_and_pushes_depend_on_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are synced before their effect; finished groups are in the journal, which is synced as well."""
    synced: dict[str, int] = {}

    def fsync(descriptor: int) -> None:
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", fsync)
    trainer = Trainer(tmp_path, 1, lookahead=1, max_staleness=2)
    submit = trainer.stream.submit

    def check() -> None:
        for path in list_files(log_folder(journal_folder(tmp_path))):
            data = path.read_bytes()[synced.get(str(path), 0) :]
            assert all(json.loads(line)["event"] in ("finished", "removed") for line in data.splitlines())
        for path in journal_folder(tmp_path).rglob("*.groups"):
            assert synced[str(path)] == path.stat().st_size
        assert {str(path) for path in journal_folder(tmp_path).rglob("*") if path.is_dir()} <= synced.keys()

    def checked_submit(*jobs: GroupJob) -> None:
        check()
        submit(*jobs)

    monkeypatch.setattr(trainer.stream, "submit", checked_submit)
    for _ in range(4):
        trainer.take()
        check()
        trainer.push()
        check()
    trainer.groups.state()
    (path,) = list_files(log_folder(journal_folder(tmp_path)))
    assert synced[str(path)] == path.stat().st_size


@pytest.mark.parametrize("seed", range(3))
def test_groups_of_weights_that_are_lost_with_the_log_are_sampled_again(tmp_path: Path, seed: int) -> None:
    """The journal has groups of later versions under the names of groups that the run has yet to admit."""
    trainer = Trainer(tmp_path, seed, lookahead=1, max_staleness=2)
    trainer.take()
    trainer.push()
    checkpoint = trainer.groups.state(), trainer.label
    for _ in range(4):
        trainer.take()
        trainer.push()
    list_files(log_folder(journal_folder(tmp_path)))[-1].unlink()
    trainer.batches, trainer.staleness = {1: trainer.batches[1]}, {1: trainer.staleness[1]}
    trainer.kill(checkpoint)
    trainer.run()
    assert sorted(prompts(trainer)) == sorted(ALL)
    assert all(max(tokens) < step for step, tokens in trainer.tokens.items())
