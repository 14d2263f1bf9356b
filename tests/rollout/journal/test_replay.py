"""The journal is read and written on one thread, for all groups that wait for it at once."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import WorkerError
from megarl.rollout.journal.journal import FinishedJob, Journal, JournalEntry, read_step
from megarl.rollout.journal.replay import Replay
from megarl.rollout.rollout_worker import GroupJob
from tests.rollout.clock import in_event_loop
from tests.rollout.journal.test_journal import STEP, as_bits, finished_group, job
from tests.time_limits import HANG_SECONDS


class SlowJournal(Journal):
    """Waits in each call until `go` is set, and keeps the numbers of jobs of the calls."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "ours")
        self.go, self.busy = threading.Event(), threading.Event()
        self.num_appended: list[int] = []
        self.num_looked_up: list[int] = []

    def append(self, step: int, finished: Sequence[FinishedJob]) -> list[JournalEntry]:
        self.num_appended.append(len(finished))
        self.busy.set()
        assert self.go.wait(HANG_SECONDS)
        return super().append(step, finished)

    def lookup(self, step: int, jobs: Sequence[GroupJob]) -> list[JournalEntry | None]:
        self.num_looked_up.append(len(jobs))
        return super().lookup(step, jobs)


async def begin_appends(replay: Replay, journal: SlowJournal, jobs: Sequence[GroupJob]) -> list[asyncio.Task[Any]]:
    """Append the first job, and the others while the journal's thread works on it."""
    tasks = [asyncio.create_task(replay.append(STEP, jobs[0], *finished_group(jobs[0])))]
    assert await asyncio.to_thread(journal.busy.wait, HANG_SECONDS)
    tasks += [asyncio.create_task(replay.append(STEP, each, *finished_group(each))) for each in jobs[1:]]
    await asyncio.sleep(0)
    journal.go.set()
    return tasks


def test_groups_that_finish_while_the_journal_is_busy_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        journal = SlowJournal(tmp_path)
        replay, jobs = Replay(journal), [job(group) for group in range(6)]
        writes, write = list[int](), os.write

        def counted(descriptor: int, data: Any) -> int:
            if threading.current_thread().name.startswith("journal"):
                writes.append(len(data))
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", counted)
        entries = await asyncio.gather(*await begin_appends(replay, journal, jobs))
        assert journal.num_appended == [1, 5]
        assert len(writes) == 3  # the file's header record, the first group, and the five others
        assert [as_bits(entry) for entry in entries] == [as_bits(finished_group(each)) for each in jobs]
        assert [as_bits(entry) for entry in read_step(tmp_path, STEP)] == [as_bits(entry) for entry in entries]

    asyncio.run(run())


@in_event_loop
async def test_jobs_that_begin_together_are_looked_up_together(tmp_path: Path) -> None:
    journal = SlowJournal(tmp_path)
    journal.go.set()
    replay = Replay(journal)
    await replay.append(STEP, job(1), *finished_group(job(1)))
    found = await asyncio.gather(*(replay.lookup(STEP, job(group)) for group in range(3)))
    assert journal.num_looked_up == [3]
    assert [entry is not None for entry in found] == [False, True, False]


@in_event_loop
async def test_an_error_reaches_all_groups_of_the_call_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = SlowJournal(tmp_path)
    replay, jobs = Replay(journal), [job(group) for group in range(4)]
    write, count = journal._write, 0

    def full(descriptor: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    def fail_second(*arguments: Any) -> None:
        nonlocal count
        count += 1
        with monkeypatch.context() as patch:
            if count == 2:
                patch.setattr(os, "write", full)
            write(*arguments)

    monkeypatch.setattr(journal, "_write", fail_second)
    first, *others = await asyncio.gather(*await begin_appends(replay, journal, jobs), return_exceptions=True)
    assert as_bits(first) == as_bits(finished_group(jobs[0]))
    for error in others:
        assert isinstance(error, WorkerError)
        assert str(error).startswith("step-12-1 (and 2 more) is done but cannot be written to ")
    again = await replay.append(STEP, jobs[1], *finished_group(jobs[1], seed=9))
    assert as_bits(again) == as_bits(finished_group(jobs[1], seed=9))


@in_event_loop
async def test_a_group_whose_caller_has_gone_is_written(tmp_path: Path) -> None:
    journal = SlowJournal(tmp_path)
    replay, jobs = Replay(journal), [job(group) for group in range(3)]
    journal.go.set()
    tasks = [asyncio.create_task(replay.append(STEP, each, *finished_group(each))) for each in jobs]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert len(read_step(tmp_path, STEP)) == 3
