"""A schedule that drives processes: an engine and a trainer that sleep, as Ray actors."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import ray

from benchmarks.schedule.accounts import Accounts
from benchmarks.schedule.cases import Case
from benchmarks.schedule.workload import Workload
from megarl.run.schedule.schedule import Schedule


class ScriptedEngine:
    """Slots that sleep for the length of a sample; the sleep stops while weights are pushed."""

    def __init__(self, num_slots: int) -> None:
        self._slots = asyncio.Semaphore(num_slots)
        self._version = 0
        self._serves, self._paused = asyncio.Event(), asyncio.Event()
        self._serves.set()

    async def generate(self, durations: list[float]) -> dict[int, float]:
        """Sleep for each of the durations in a slot; return version -> seconds that slots slept with it."""
        seconds: dict[int, float] = {}
        await asyncio.gather(*(self._sample(duration, seconds) for duration in durations))
        return seconds

    async def _sample(self, duration: float, seconds: dict[int, float]) -> None:
        clock = asyncio.get_running_loop().time
        async with self._slots:
            while duration > 0:
                await self._serves.wait()
                start, version = clock(), self._version
                try:
                    await asyncio.wait_for(self._paused.wait(), timeout=duration)
                    slept = min(duration, clock() - start)
                except TimeoutError:
                    slept = duration
                seconds[version] = seconds.get(version, 0.0) + slept
                duration -= slept

    async def push(self, version: int, seconds: float) -> None:
        """Stop the samples for a time, and continue them with another version."""
        self._serves.clear()
        self._paused.set()
        await asyncio.sleep(seconds)
        self._version = version
        self._paused.clear()
        self._serves.set()


class ScriptedTrainer:
    """Sleeps for each step."""

    def train(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


@dataclass(slots=True)
class _Call:
    ordinal: int
    submitted_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRun:
    """The accounts of a run, with times in units of a step's generation, and the driver's CPU time."""

    accounts: Accounts
    cpu_fraction: float
    """CPU time of the driver's process as a share of the run's time."""


@dataclass(slots=True, kw_only=True)
class ScriptedRun:
    """Drives an engine and a trainer by a schedule, until the last step is pushed."""

    case: Case
    workload: Workload
    step_seconds: float
    """Seconds of a step's generation and, times `workload.train_seconds`, of its training."""
    calls: dict[ray.ObjectRef, _Call] = field(default_factory=dict)
    seconds: dict[int, dict[int, float]] = field(default_factory=dict)
    """Ordinal -> version -> time of the slots, of finished groups."""

    def run(self) -> ProcessRun:
        """Run the schedule; Ray must be initialized."""
        workload, schedule = self.workload, Schedule(self.case.policy, self.workload.groups_per_step)
        engine = ray.remote(ScriptedEngine).options(num_cpus=0, max_concurrency=100_000).remote(workload.num_slots)
        trainer = ray.remote(ScriptedTrainer).options(num_cpus=0).remote()
        ray.get([engine.push.remote(0, 0.0), trainer.train.remote(0.0)])
        accounts = Accounts(case=self.case, workload=workload)
        lengths = workload.lengths()
        start, cpu = time.monotonic(), time.process_time()
        training: ray.ObjectRef | None = None
        is_trained = False
        while True:
            for ordinal in schedule.admit(schedule.capacity).ordinals:
                accounts.admit(ordinal, float(lengths[ordinal].sum()))
                durations = lengths[ordinal] * workload.seconds_per_length * self.step_seconds
                call = engine.generate.remote(durations.tolist())
                self.calls[call] = _Call(ordinal, time.monotonic())
            if (batch := schedule.pick()) is not None:
                schedule.lease(batch)
                seconds = {ordinal: self.seconds.pop(ordinal) for ordinal in batch}
                accounts.lease(schedule.step, seconds, schedule.group_staleness())
                training = trainer.train.remote(workload.train_seconds * self.step_seconds)
            elif schedule.leased is None:
                schedule.mark_waiting()
            if is_trained and schedule.can_push:
                ray.get(engine.push.remote(schedule.step, workload.pause_seconds * self.step_seconds))
                schedule.push()
                accounts.push((time.monotonic() - start) / self.step_seconds)
                is_trained = False
                if schedule.version == workload.num_steps:
                    break
                continue
            done, _ = ray.wait([*self.calls, *([] if training is None else [training])], num_returns=1)
            for ref in done:
                if ref == training:
                    training, is_trained = None, True
                else:
                    self._finish(ref, schedule, accounts)
        cpu_fraction = (time.process_time() - cpu) / (time.monotonic() - start)
        for actor in (engine, trainer):
            ray.kill(actor)
        return ProcessRun(accounts=accounts, cpu_fraction=cpu_fraction)

    def _finish(self, ref: ray.ObjectRef, schedule: Schedule, accounts: Accounts) -> None:
        call, seconds = self.calls.pop(ref), ray.get(ref)
        schedule.finish(call.ordinal, oldest=min(seconds), newest=max(seconds))
        self.seconds[call.ordinal] = {version: spent / self.step_seconds for version, spent in seconds.items()}
        accounts.finish((time.monotonic() - call.submitted_at) / self.step_seconds)
