"""Discrete-event simulation of engines and a trainer that a schedule drives."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from benchmarks.schedule.accounts import Accounts
from benchmarks.schedule.cases import Case
from benchmarks.schedule.workload import Workload
from megarl.run.schedule.schedule import Schedule

ROUNDING = 1e-9
"""Shortest time that a version is said to have worked on a sample."""


@dataclass(slots=True)
class _Sample:
    """A sample that a slot is generating."""

    group: int
    start: float
    """Engine time."""
    end: float


class Engines:
    """Slots that generate one sample each, in the order of arrival; their clock stops while weights are pushed."""

    def __init__(self, workload: Workload) -> None:
        self._free = workload.num_slots
        self._waiting: deque[tuple[int, float]] = deque()
        self._running: dict[int, _Sample] = {}
        self._ends: list[tuple[float, int]] = []
        self._next_id = 0
        self._paused = 0.0
        """Total time of all pauses: wall time = engine time + paused."""

    def submit(self, group: int, durations: list[float], now: float) -> None:
        """Queue the samples of a group."""
        self._waiting += [(group, duration) for duration in durations]
        self._fill(now - self._paused)

    def next_end(self) -> float:
        """Return the wall time at which the next sample ends; infinite if none runs."""
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        return self._ends[0][0] + self._paused if self._ends else float("inf")

    def pop_end(self) -> _Sample:
        """End the next sample, and return it."""
        end, number = heapq.heappop(self._ends)
        sample = self._running.pop(number)
        self._free += 1
        self._fill(end)
        return sample

    def pause(self, seconds: float) -> None:
        """Stop the clock for a time that begins now; the caller moves on to its end."""
        self._paused += seconds

    def engine_time(self, now: float) -> float:
        """Return the engine time at the wall time `now`."""
        return now - self._paused

    def abort(self, groups: set[int], now: float) -> float:
        """Abort the samples of the groups; return the time that slots have spent on those unfinished."""
        time = now - self._paused
        self._waiting = deque(item for item in self._waiting if item[0] not in groups)
        aborted = [number for number, sample in self._running.items() if sample.group in groups]
        spent = sum(time - self._running.pop(number).start for number in aborted)
        self._free += len(aborted)
        self._fill(time)
        return spent

    def _fill(self, time: float) -> None:
        while self._free and self._waiting:
            group, duration = self._waiting.popleft()
            self._free -= 1
            self._running[self._next_id] = _Sample(group, time, time + duration)
            heapq.heappush(self._ends, (time + duration, self._next_id))
            self._next_id += 1


@dataclass(slots=True)
class _Group:
    admitted_at: float
    num_left: int
    seconds: dict[int, float] = field(default_factory=dict)
    """Version -> time that slots have spent with it."""


def simulate(case: Case, workload: Workload) -> Accounts:
    """Run the schedule on simulated engines and trainer until the last step is pushed; return its accounts."""
    return _Simulation(case, workload).run()


class _Simulation:
    def __init__(self, case: Case, workload: Workload) -> None:
        self.workload = workload
        self.schedule = Schedule(case.policy, workload.groups_per_step)
        self.engines = Engines(workload)
        self.accounts = Accounts(case=case, workload=workload)
        self.now = 0.0
        self.groups: dict[int, _Group] = {}
        self.push_times: list[float] = [0.0]
        """Engine time at which each version arrived."""
        self.lengths = workload.lengths()

    def run(self) -> Accounts:
        schedule, trained_at = self.schedule, float("inf")
        self.admit()
        while schedule.version < self.workload.num_steps:
            if trained_at == float("inf"):
                if (batch := schedule.pick()) is None:
                    schedule.mark_waiting()
                else:
                    schedule.lease(batch)
                    seconds = {ordinal: self.groups.pop(ordinal).seconds for ordinal in batch}
                    self.accounts.lease(schedule.step, seconds, schedule.group_staleness())
                    trained_at = self.now + self.workload.train_seconds
            if trained_at <= max(self.now, self.engines.next_end()) and schedule.can_push:
                self.now = max(self.now, trained_at)
                self.push()
                trained_at = float("inf")
            else:
                assert self.engines.next_end() < float("inf"), "the schedule is stuck"
                self.end_sample()
        return self.accounts

    def admit(self) -> None:
        for ordinal in self.schedule.admit(self.schedule.capacity).ordinals:
            lengths = self.lengths[ordinal]
            self.accounts.admit(ordinal, float(lengths.sum()))
            durations = (lengths * self.workload.seconds_per_length).tolist()
            self.groups[ordinal] = _Group(self.now, len(durations))
            self.engines.submit(ordinal, durations, self.now)

    def end_sample(self) -> None:
        self.now = max(self.now, self.engines.next_end())
        sample = self.engines.pop_end()
        group = self.groups[sample.group]
        group.num_left -= 1
        self._add_seconds(group.seconds, sample)
        if not group.num_left:
            self.schedule.finish(sample.group, oldest=min(group.seconds))
            self.accounts.finish(self.now - group.admitted_at)

    def _add_seconds(self, seconds: dict[int, float], sample: _Sample) -> None:
        """Add the time of a sample to that of the versions that generated it."""
        version, end = self.schedule.version, sample.end
        while True:
            start = max(sample.start, self.push_times[version])
            if end > start + ROUNDING:
                seconds[version] = seconds.get(version, 0.0) + end - start
            if start == sample.start:
                return
            version, end = version - 1, start

    def push(self) -> None:
        self.engines.pause(self.workload.pause_seconds)
        self.now += self.workload.pause_seconds
        self.push_times.append(self.engines.engine_time(self.now))
        dropped = self.schedule.push().dropped
        self.accounts.push(self.now)
        if dropped:
            spent = sum(sum(self.groups.pop(ordinal).seconds.values()) for ordinal in dropped)
            self.accounts.drop(len(dropped), spent + self.engines.abort(set(dropped), self.now))
        self.admit()
