"""Asynchronous access to the journal: its files are read and written on one thread, in order.

What arrives while the thread is busy is looked up, or appended, together: a thread that competes with the event loop
for the interpreter takes milliseconds for each call, most of which it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from megarl.batch.trajectory import Trajectory
from megarl.rollout.journal.journal import FinishedJob, Journal, JournalEntry
from megarl.rollout.rollout_worker import GroupJob, GroupSummary
from megarl.workers.shared_call import call_for_all

A = TypeVar("A")
R = TypeVar("R")


class Replay:
    """Looks jobs up in the journal and appends finished ones, without blocking the event loop."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: dict[tuple[Callable[..., Any], int], list[tuple[Any, asyncio.Future[Any]]]] = {}
        """By method of the journal and step, the arguments of calls that have not begun."""
        self._calling: asyncio.Task[None] | None = None

    async def lookup(self, step: int, job: GroupJob) -> JournalEntry | None:
        """Return the journal entry of the job, or None if there is none; raises as `Journal.lookup`.

        Jobs that are looked up together resume in the same iteration of the event loop, so that their requests still
        go to the engine in one call.
        """
        return await self._call(self._journal.lookup, step, job)

    async def append(
        self, step: int, job: GroupJob, summary: GroupSummary, trajectories: Sequence[Trajectory]
    ) -> JournalEntry:
        """Append the group to the journal and return the entry that counts; raises as `Journal.append`."""
        return await self._call(self._journal.append, step, FinishedJob(job, summary, trajectories))

    async def _call(self, method: Callable[[int, Sequence[A]], Sequence[R]], step: int, argument: A) -> R:
        """Return the item of `method(step, arguments)` for this one of the arguments."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending.setdefault((method, step), []).append((argument, future))
        if self._calling is None or self._calling.done():
            self._calling = asyncio.create_task(self._call_pending())
        return await future

    async def _call_pending(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            method, step = key = next(iter(self._pending))
            await call_for_all(partial(loop.run_in_executor, self._thread, method, step), self._pending.pop(key))
