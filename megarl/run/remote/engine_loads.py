"""Names an engine and a rollout worker for each group of a run, so that all engines have equally much to sample.

    8 engines, 2 workers     share 0: worker 0, engines 0 2 4 6;     share 1: worker 1, engines 1 3 5 7
    2 engines, 4 workers     share 0: workers 0 2, engine 0;         share 1: workers 1 3, engine 1

No two workers ask the same engine for its partial outputs, as long as there are enough engines. A group whose engine is
lost continues on one that its worker chooses (`EnginePool`).
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from megarl.rollout.rollout_worker import GroupJob


@dataclass(slots=True, eq=False)
class EngineLoad:
    """The samples of an engine's processes, from their start to their loss."""

    engine: int
    turn: int
    """Increases with each group that any engine gets: of two equally loaded engines, the lower one is next."""
    outstanding: int = 0
    """Number of samples in flight on the engine, of all workers and streams."""
    is_serving: bool = True


@dataclass(frozen=True, slots=True)
class AssignedJob:
    """A job for the worker that it was assigned to."""

    job: GroupJob
    load: EngineLoad | None
    """Of the engine that the job names; None: it names none that serves."""


class _LoadHeap:
    """Engines by their load; an entry is outdated if the engine has been lost, or has another load since."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, EngineLoad]] = []
        self._num_engines = 0

    def add(self, load: EngineLoad) -> None:
        """Add an engine, or its new load."""
        heapq.heappush(self._entries, (load.outstanding, load.turn, load))
        if len(self._entries) > 64 + 4 * self._num_engines:
            valid = {id(load): load for *_, load in self._entries if load.is_serving}
            self._entries = [(load.outstanding, load.turn, load) for load in valid.values()]
            self._num_engines = len(valid)
            heapq.heapify(self._entries)

    def least(self) -> EngineLoad | None:
        """Return the serving engine with the fewest samples; None if none serves."""
        while self._entries:
            outstanding, turn, load = self._entries[0]
            if load.is_serving and (outstanding, turn) == (load.outstanding, load.turn):
                return load
            heapq.heappop(self._entries)
        return None


class EngineLoads:
    """The samples in flight on each engine of a run, over all of its streams.

    With S the smaller number of workers and engines, share s has the workers s, s + S, ..., which send requests to the
    engines s, s + S, ... only.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._turns = itertools.count()
        self._loads: list[EngineLoad | None] = []
        """By engine; None for one that does not serve."""
        self._all = _LoadHeap()
        self._by_share: list[_LoadHeap] = []
        self._workers_by_share: list[Iterator[int]] = []
        """The workers of each share in turn, again and again."""
        self._all_workers = itertools.cycle(range(num_workers))

    @property
    def outstanding(self) -> list[int]:
        """Number of samples in flight on each engine; 0 for one that does not serve."""
        return [0 if load is None else load.outstanding for load in self._loads]

    def start(self, serving: Sequence[bool]) -> None:
        """Begin with engines without samples, of which those serve for which `serving` is true."""
        self._loads = [None] * len(serving)
        num_shares = min(len(serving), self._num_workers)
        self._by_share = [_LoadHeap() for _ in range(num_shares)]
        self._workers_by_share = [itertools.cycle(range(s, self._num_workers, num_shares)) for s in range(num_shares)]
        for engine, serves in enumerate(serving):
            self.replace(engine, serves=serves)

    def replace(self, engine: int, *, serves: bool) -> None:
        """Forget the samples of an engine that was lost or restarted; `serves`: whether it takes new ones."""
        if (lost := self._loads[engine]) is not None:
            lost.is_serving = False
        self._loads[engine] = load = EngineLoad(engine, next(self._turns)) if serves else None
        self._change(load, 0)

    def assign(self, jobs: Sequence[GroupJob], max_per_block: int) -> dict[int, list[AssignedJob]]:
        """Return the jobs by the index of their workers, with the engines that they name.

        Each job gets the engine with the fewest samples. Blocks of up to `max_per_block` adjacent jobs have the same
        worker, smaller ones if some workers of a share would get none. A job that names an engine keeps it.
        """
        free = [job for job in jobs if job.engine is None]
        by_worker: dict[int, list[AssignedJob]] = {}
        if self._all.least() is None:
            for job in free:
                by_worker.setdefault(next(self._all_workers), []).append(AssignedJob(job, None))
            free = []
        unassigned = iter(free)
        for share, block in self._in_turn(self._choose(free), max_per_block):
            own = by_worker.setdefault(next(self._workers_by_share[share]), [])
            for (load, num_samples), job in zip(block, unassigned, strict=False):
                if job.num_episodes != num_samples:
                    self._change(load, job.num_episodes - num_samples)
                own.append(AssignedJob(job, load))
        for job in jobs:
            if job.engine is not None:
                worker = next(self._workers_by_share[job.engine % len(self._by_share)])
                by_worker.setdefault(worker, []).extend(self.assign_to(worker, [job]))
        return by_worker

    def assign_to(self, worker: int, jobs: Iterable[GroupJob]) -> list[AssignedJob]:
        """Return jobs for a worker: each names the least loaded engine of its share, unless it names one already."""
        heap = self._by_share[worker % len(self._by_share)]
        assigned = []
        for job in jobs:
            load = heap.least() if job.engine is None else self._loads[job.engine]
            self._change(load, job.num_episodes)
            assigned.append(AssignedJob(job, load))
        return assigned

    def release(self, *assigned: AssignedJob) -> None:
        """Subtract the samples of jobs that have finished, are cancelled, or are assigned again."""
        loads, num_samples = dict[int, EngineLoad | None](), Counter[int]()
        for each in assigned:
            loads[id(each.load)] = each.load
            num_samples[id(each.load)] += each.job.num_episodes
        for key, load in loads.items():
            self._change(load, -num_samples[key])

    def _change(self, load: EngineLoad | None, num_samples: int) -> None:
        """Add samples to an engine that serves; no-op without one."""
        if load is None or not load.is_serving:
            return
        self._add_samples(load, num_samples)
        self._by_share[load.engine % len(self._by_share)].add(load)

    def _add_samples(self, load: EngineLoad, num_samples: int) -> None:
        """Add samples to an engine that serves; its share must get the new load before the share is used."""
        load.outstanding += num_samples
        if num_samples > 0:
            load.turn = next(self._turns)
        self._all.add(load)

    def _choose(self, jobs: Sequence[GroupJob]) -> dict[int, list[tuple[EngineLoad, int]]]:
        """Return, by share, an engine for each job, and the samples that it was given."""
        chosen: dict[int, list[tuple[EngineLoad, int]]] = {}
        for job in jobs:
            load = self._all.least()
            assert load is not None, "no engine serves"
            self._add_samples(load, job.num_episodes)
            chosen.setdefault(load.engine % len(self._by_share), []).append((load, job.num_episodes))
        for share, own in chosen.items():
            for load in {id(load): load for load, _ in own}.values():
                self._by_share[share].add(load)
        return chosen

    def _in_turn[T](self, by_share: dict[int, list[T]], max_per_block: int) -> Iterator[tuple[int, Sequence[T]]]:
        """Yield blocks of each share's items, those of all shares in turn."""
        num_workers = self._num_workers // max(1, len(self._by_share))
        blocks = {share: deque(_split(items, num_workers, max_per_block)) for share, items in by_share.items()}
        while blocks:
            for share, left in list(blocks.items()):
                yield share, left.popleft()
                if not left:
                    del blocks[share]


def _split[T](items: Sequence[T], num_workers: int, max_per_block: int) -> Iterator[Sequence[T]]:
    """Yield blocks of about the same size, equally many for each worker; single items if there are few."""
    num_blocks = len(items)
    if len(items) >= 2 * num_workers:
        num_blocks = num_workers * ceil(len(items) / (num_workers * max_per_block))
    first = 0
    for block in range(num_blocks):
        last = first + ceil((len(items) - first) / (num_blocks - block))
        yield items[first:last]
        first = last
