"""Which engines the groups of several workers use, with uneven lengths and the loss of an engine, in virtual time."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from megarl.engines.engine import FinishedRequest, Generation, GenerationRequest
from megarl.errors import LostEngineError
from megarl.rollout.rollout_worker import GroupJob, RolloutWorker, RolloutWorkerSpec
from megarl.run.remote.rollout_workers import AssignedJob, EngineLoads
from tests.rollout.clock import in_virtual_time
from tests.rollout.whole_batches import NoScores, make_generation, make_group_job
from tests.virtual_time import run_in_virtual_time

SLOTS = 8
GROUP_SIZE = 8


def seconds_of(request_id: str) -> float:
    """Return the length of a request: a long tail, the same on every engine, and too short for partial outputs."""
    return min(3.0, random.Random(request_id).expovariate(2.0) + 0.05)


@dataclass
class SlottedEngine:
    """Samples `SLOTS` requests at a time, in the order of their arrival."""

    requests: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(SLOTS)

    async def _sample(self, index: int, request: GenerationRequest) -> FinishedRequest:
        async with self._slots:
            await asyncio.sleep(seconds_of(request.request_id))
        return index, make_generation([7, 8])

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[FinishedRequest]]:
        self.requests += [request.request_id for request in requests]
        lost = asyncio.ensure_future(self.lost.wait())
        running: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(self._sample(index, request)) for index, request in enumerate(requests)
        }
        try:
            while running:
                done, running = await asyncio.wait({*running, lost}, return_when=asyncio.FIRST_COMPLETED)
                if lost in done:
                    raise LostEngineError("SIGKILL")
                running.discard(lost)
                yield [each.result() for each in done]
        finally:
            for each in (*running, lost):
                each.cancel()

    async def partial_outputs(self, known: Mapping[str, int]) -> dict[str, Generation]:
        return {}

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


@dataclass
class Run:
    """Workers on fake engines, and the jobs of each worker."""

    engines: list[SlottedEngine]
    workers: list[RolloutWorker]
    loads: EngineLoads

    @classmethod
    def start(cls, num_workers: int, num_engines: int) -> "Run":
        engines: Any = [SlottedEngine() for _ in range(num_engines)]
        spec = RolloutWorkerSpec(request_timeout_seconds=1e6)
        workers = [RolloutWorker(spec, engines, NoScores(), tokenizer=None) for _ in range(num_workers)]  # type: ignore[arg-type]
        loads = EngineLoads(num_workers)
        loads.start([True] * num_engines)
        return cls(engines, workers, loads)

    async def lose(self, engine: int) -> None:
        self.engines[engine].lost.set()
        self.loads.replace(engine, serves=False)
        for worker in self.workers:
            await worker.update_engines({engine: LostEngineError("SIGKILL")})

    async def sample_through_stream(self, jobs: Sequence[GroupJob], max_per_block: int = 8) -> None:
        """Send the jobs as `GroupStream.submit` does."""

        async def roll(worker: int, assigned: Any) -> None:
            engine = assigned.job.engine if assigned.load is None else assigned.load.engine
            job = make_group_job(
                group_id=assigned.job.group_id,
                num_samples=assigned.job.num_samples,
                request_id=assigned.job.request_id,
                engine=engine,
            )
            await self.workers[worker].rollout_group(job)
            self.loads.release(assigned)

        by_worker = self.loads.assign(jobs, max_per_block)
        await asyncio.gather(*(roll(worker, each) for worker, own in by_worker.items() for each in own))

    async def sample_through_workers(self, jobs: Sequence[GroupJob]) -> None:
        """Send each worker the jobs of every W-th group; none knows those of the others."""
        num = len(self.workers)
        await asyncio.gather(*(self.workers[n % num].rollout_group(job) for n, job in enumerate(jobs)))


def jobs_of(count: int, num_samples: int = GROUP_SIZE, **changes: Any) -> list[GroupJob]:
    return [
        make_group_job(group_id=number, num_samples=num_samples, request_id=f"step-1-{number}", **changes)
        for number in range(count)
    ]


def spread(values: Sequence[float]) -> float:
    """Return the largest value over the mean."""
    return max(values) * len(values) / sum(values)


SIZES = [(2, 16, 8, GROUP_SIZE), (16, 4, 64, GROUP_SIZE), (64, 12, 256, GROUP_SIZE), (256, 49, 1000, 1)]
"""Workers, groups per worker, engines, samples per group: fewer in the last case, to keep it cheap."""


@pytest.mark.parametrize("way", ["sample_through_stream", "sample_through_workers"])
@pytest.mark.parametrize(("num_workers", "per_worker", "num_engines", "num_samples"), SIZES)
def test_all_engines_have_about_equally_much_to_sample(
    way: str, num_workers: int, per_worker: int, num_engines: int, num_samples: int
) -> None:
    """Also after one is lost, when about half of its samples are unfinished."""

    async def main() -> Run:
        run = Run.start(num_workers, num_engines)
        sampling = asyncio.ensure_future(getattr(run, way)(jobs_of(num_workers * per_worker, num_samples)))
        await asyncio.sleep(1.0)
        assert all(engine.requests for engine in run.engines)
        assert spread([len(engine.requests) for engine in run.engines]) <= 1.15
        await run.lose(num_engines // 2)
        await sampling
        return run

    run = run_in_virtual_time(main())
    live = [engine for number, engine in enumerate(run.engines) if number != num_engines // 2]
    by_requests = spread([len(engine.requests) for engine in live])
    if num_workers * per_worker > num_engines:
        assert by_requests <= 1.3
    assert run.loads.outstanding == [0] * num_engines


@in_virtual_time
async def test_the_samples_of_a_lost_engines_group_spread_over_the_others() -> None:
    run = Run.start(1, 9)
    (job,) = jobs_of(1, 8)
    group = asyncio.ensure_future(run.workers[0].rollout_group(replace(job, engine=4)))
    await asyncio.sleep(0.01)
    assert [len(engine.requests) for engine in run.engines] == [0, 0, 0, 0, 8, 0, 0, 0, 0]
    await run.lose(4)
    await asyncio.sleep(0.01)
    assert [len(engine.requests) for engine in run.engines] == [1, 1, 1, 1, 8, 1, 1, 1, 1]
    assert run.workers[0].pool.outstanding == [1, 1, 1, 1, 8, 1, 1, 1, 1]  # that of the lost engine is not looked at
    await group
    assert sum(run.workers[0].pool.outstanding) == 0


def test_samples_count_until_a_job_ends_and_are_forgotten_with_their_engine() -> None:
    loads = EngineLoads(1)
    loads.start([True, True, False])
    jobs = jobs_of(3, num_samples=2, has_baseline=True)
    (assigned,) = loads.assign(jobs, 8).values()
    assert [each.load and each.load.engine for each in assigned] == [0, 1, 0]
    assert loads.outstanding == [6, 3, 0]
    loads.release(assigned[0])
    assert loads.outstanding == [3, 3, 0]
    loads.replace(0, serves=False)
    loads.replace(2, serves=True)
    loads.release(assigned[2])
    assert loads.outstanding == [0, 3, 0]
    loads.replace(0, serves=True)
    more = [each.load and each.load.engine for each in loads.assign_to(0, jobs)]
    assert more == [2, 0, 1]
    assert loads.outstanding == [3, 6, 3]


def test_each_engine_has_one_worker_and_blocks_are_as_large_as_objects() -> None:
    loads = EngineLoads(4)
    loads.start([True] * 8)
    by_worker = loads.assign(jobs_of(64), 8)
    for worker, assigned in by_worker.items():
        ids = [each.job.group_id for each in assigned]
        assert ids == [*range(8 * worker, 8 * worker + 8), *range(32 + 8 * worker, 40 + 8 * worker)]
        assert {each.load.engine % 4 for each in assigned if each.load} == {worker}
    assert loads.outstanding == [64] * 8


@pytest.mark.parametrize("num_engines", [3, 5, 8, 13])
def test_engines_get_equally_many_groups_whatever_their_number(num_engines: int) -> None:
    loads = EngineLoads(2)
    loads.start([True] * num_engines)
    for count in (7, 31, 64):
        loads.assign(jobs_of(count, num_samples=2), 8)
        assert max(loads.outstanding) - min(loads.outstanding) <= 2


def test_samples_are_counted_by_job() -> None:
    """Also if jobs of one call have different numbers of them."""
    loads = EngineLoads(2)
    loads.start([True] * 5)
    jobs = [replace(job, num_samples=1 + job.group_id % 3) for job in jobs_of(64)]
    assigned = [each for own in loads.assign(jobs, 8).values() for each in own]
    assert sorted(each.job.group_id for each in assigned) == list(range(64))
    for engine, outstanding in enumerate(loads.outstanding):
        assert outstanding == sum(each.job.num_samples for each in assigned if each.load and each.load.engine == engine)
    for each in assigned:
        loads.release(each)
    assert loads.outstanding == [0] * 5


def test_jobs_that_end_together_count_as_one_by_one() -> None:
    """A run that releases groups in calls of several names the same engines as one that releases each by itself."""
    rng, runs = np.random.default_rng(0), [EngineLoads(3), EngineLoads(3)]
    for loads in runs:
        loads.start([True] * 7)
    flying: list[list[AssignedJob]] = [[], []]
    for _ in range(40):
        jobs = [replace(job, num_samples=int(n)) for job, n in zip(jobs_of(9), rng.integers(1, 5, 9), strict=True)]
        engines = []
        for loads, own in zip(runs, flying, strict=True):
            assigned = [each for of_worker in loads.assign(jobs, 4).values() for each in of_worker]
            engines.append([each.load.engine for each in assigned if each.load])
            own += assigned
        assert engines[0] == engines[1]
        ended = sorted(rng.choice(len(flying[0]), len(flying[0]) // 2, replace=False).tolist(), reverse=True)
        runs[0].release(*[flying[0].pop(i) for i in ended])
        for i in ended:
            runs[1].release(flying[1].pop(i))
        assert runs[0].outstanding == runs[1].outstanding


def test_fewer_engines_than_workers_are_each_served_by_their_own_workers() -> None:
    loads = EngineLoads(6)
    loads.start([True, True])
    by_worker = loads.assign(jobs_of(60), 8)
    assert {worker: len(own) for worker, own in by_worker.items()} == dict.fromkeys(range(6), 10)
    assert all(each.load and each.load.engine == worker % 2 for worker, own in by_worker.items() for each in own)


def test_jobs_that_name_an_engine_go_to_its_worker_and_count() -> None:
    loads = EngineLoads(2)
    loads.start([True, True, False, True])
    named = [replace(job, engine=number) for number, job in enumerate(jobs_of(4, num_samples=1))]
    by_worker = loads.assign(named, 8)
    assert {worker: [each.job.engine for each in own] for worker, own in by_worker.items()} == {0: [0, 2], 1: [1, 3]}
    assert loads.outstanding == [1, 1, 0, 1]


def test_without_an_engine_that_serves_workers_take_jobs_in_turn_and_wait() -> None:
    loads = EngineLoads(3)
    loads.start([False] * 8)
    by_worker = loads.assign(jobs_of(5), 8)
    assert {worker: len(own) for worker, own in by_worker.items()} == {0: 2, 1: 2, 2: 1}
    assert all(each.load is None for own in by_worker.values() for each in own)
    for own in by_worker.values():
        loads.release(own[0])


def test_the_choice_stays_cheap_over_many_steps() -> None:
    """Outdated entries of the heaps are removed."""
    loads = EngineLoads(16)
    loads.start([True] * 100)
    assigned = deque[AssignedJob]()
    for number, job in enumerate(jobs_of(20_000, num_samples=1)):
        for own in loads.assign([job], 8).values():
            assigned.extend(own)
        if number >= 300:
            loads.release(assigned.popleft())
    assert max(loads.outstanding) <= 4
    assert len(loads._all._entries) <= 64 + 4 * 100
