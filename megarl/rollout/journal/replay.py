"""The journal as a worker's event loop uses it: its files are read and written on one thread, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megarl.batch.trajectory import Trajectory
from megarl.rollout.journal.journal import Journal, JournaledGroup
from megarl.rollout.rollout_worker import GroupJob, GroupSummary


class Replay:
    """Answers jobs from the journal, and writes the others down."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._asked: dict[int, list[tuple[GroupJob, asyncio.Future[JournaledGroup | None]]]] = {}
        self._flights: set[asyncio.Task[None]] = set()

    async def find(self, step: int, job: GroupJob) -> JournaledGroup | None:
        """See `Journal.find`.

        Jobs that are asked for while the thread is busy are looked up together, and go on in the same turn of the event
        loop, so that their requests still travel to the engine in one call.
        """
        future: asyncio.Future[JournaledGroup | None] = asyncio.get_running_loop().create_future()
        if step not in self._asked:
            self._asked[step] = []
            flight = asyncio.create_task(self._look_up(step))
            self._flights.add(flight)
            flight.add_done_callback(self._flights.discard)
        self._asked[step].append((job, future))
        return await future

    async def keep(
        self, step: int, job: GroupJob, summary: GroupSummary, trajectories: Sequence[Trajectory]
    ) -> JournaledGroup:
        """See `Journal.keep`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._journal.keep, step, job, summary, trajectories)

    async def _look_up(self, step: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, int)  # its turn
        asked = self._asked.pop(step)
        try:
            jobs = [job for job, _ in asked]
            groups = await loop.run_in_executor(self._thread, self._journal.find, step, jobs)
        except Exception as e:  # noqa: BLE001 -- raised again in each of the callers
            for _, future in asked:
                if not future.done():
                    future.set_exception(e)
            return
        for (_, future), group in zip(asked, groups, strict=True):
            if not future.done():
                future.set_result(group)
