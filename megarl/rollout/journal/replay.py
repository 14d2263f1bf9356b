"""Asynchronous access to the journal: its files are read and written on one thread, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megarl.batch.trajectory import Trajectory
from megarl.rollout.journal.journal import Journal, JournalEntry
from megarl.rollout.rollout_worker import GroupJob, GroupSummary


class Replay:
    """Looks jobs up in the journal and appends finished ones, without blocking the event loop."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: dict[int, list[tuple[GroupJob, asyncio.Future[JournalEntry | None]]]] = {}
        self._lookup_tasks: set[asyncio.Task[None]] = set()

    async def lookup(self, step: int, job: GroupJob) -> JournalEntry | None:
        """Return the journal entry of the job, or None if there is none; raises as `Journal.lookup`.

        Jobs that arrive while the thread is busy are looked up together and resume in the same iteration of the event
        loop, so that their requests still go to the engine in one call.
        """
        future: asyncio.Future[JournalEntry | None] = asyncio.get_running_loop().create_future()
        if step not in self._pending:
            self._pending[step] = []
            task = asyncio.create_task(self._look_up(step))
            self._lookup_tasks.add(task)
            task.add_done_callback(self._lookup_tasks.discard)
        self._pending[step].append((job, future))
        return await future

    async def append(
        self, step: int, job: GroupJob, summary: GroupSummary, trajectories: Sequence[Trajectory]
    ) -> JournalEntry:
        """Append the group to the journal and return the entry that counts; raises as `Journal.append`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._journal.append, step, job, summary, trajectories)

    async def _look_up(self, step: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, int)  # a no-op that waits until the thread is free
        pending = self._pending.pop(step)
        try:
            jobs = [job for job, _ in pending]
            groups = await loop.run_in_executor(self._thread, self._journal.lookup, step, jobs)
        except Exception as e:  # noqa: BLE001 -- raised again in each of the callers
            for _, future in pending:
                if not future.done():
                    future.set_exception(e)
            return
        for (_, future), group in zip(pending, groups, strict=True):
            if not future.done():
                future.set_result(group)
