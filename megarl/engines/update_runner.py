"""The weight update of one engine, in which the controller decides about all engines at once.

begin     pause generation
receive   boxes from the trainer; the TP ranks stop waiting if the controller aborts the update
report    that this engine has all weights, and wait until the controller has heard that of every engine
end       serve the new weights, or abort
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from torch._C._distributed_c10d import TCPStore

from megarl.engines.engine import EngineUpdate, UpdateReport
from megarl.errors import WeightSyncError
from megarl.reshard.planning.strategy import DeltaUpdate, SyncStats
from megarl.reshard.transfer.commit_decision import CommitDecision, CommitSpec, TransferredBytes

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.001, 0.02
"""How often an engine that has received the weights looks for the controller's decision."""

POLL_SHARE = 0.25
"""Share of the time that it has waited already, after which it looks again; within these bounds."""

ABORT_POLL_SECONDS = 0.2
"""How often an engine that receives weights looks whether the update is aborted."""


class UpdateSession(Protocol):
    """What an engine does in an update."""

    sync_seconds: float
    """Timeout of waits for other processes than the engine's, in seconds."""

    async def begin(self) -> None:
        """Pause generation and open the update."""
        ...

    async def receive(self, delta: DeltaUpdate | None) -> Sequence[SyncStats]:
        """Receive boxes; return the statistics of each TP rank that receives over the network."""
        ...

    def check_open(self) -> None:
        """Raise WeightSyncError if the update has been closed, and WorkerError if the engine has ended."""
        ...

    async def end(self, policy_version: int) -> None:
        """Set the new version and resume generation."""
        ...

    async def close(self, reason: str) -> None:
        """Abort the update, if it is open."""
        ...

    async def abort_update(self, reason: str) -> None:
        """End `receive`, whose caller closes the update."""
        ...


class UpdateRunner:
    """Runs the updates of one engine, one after another."""

    def __init__(self, session: UpdateSession) -> None:
        self._session = session
        self._one_at_a_time = asyncio.Lock()
        self._store: TCPStore | None = None
        """The store of the latest update, which the next one uses too if it has not moved."""

    async def run(self, update: EngineUpdate) -> UpdateReport:
        """Run an update, or the rest of one that has begun.

        Raises:
            WeightSyncError: a rank refused or failed, or the controller has aborted the update; it is closed.
            WorkerError: the engine has ended.
        """
        async with self._one_at_a_time:
            start = time.monotonic()
            if update.receives:
                await self._session.begin()
            opened = time.monotonic()
            try:
                decision = CommitDecision(update.commit, await self._connect(update.commit))
                stats = await self._receive(decision, update.delta) if update.receives else []
                transferred = TransferredBytes(
                    sum(each.bytes_sent for each in stats), sum(each.bytes_received for each in stats)
                )
                await asyncio.to_thread(decision.report_received, transferred)
                reason = await self._wait_decided(decision)
            except WeightSyncError as e:
                self._store = None  # it may be what has failed
                await self._session.close(str(e))
                raise
            if reason:
                await self._session.close(reason)
                raise WeightSyncError(f"the update was aborted: {reason}")
            decided = time.monotonic()
            await self._session.end(update.policy_version)
            commit_seconds = time.monotonic() - decided
            return UpdateReport(stats=tuple(stats), open_seconds=opened - start, commit_seconds=commit_seconds)

    async def _connect(self, commit: CommitSpec) -> TCPStore:
        if self._store is None or (self._store.host, self._store.port) != (commit.host, commit.port):
            self._store = await asyncio.to_thread(commit.connect)
        return self._store

    async def _receive(self, decision: CommitDecision, delta: DeltaUpdate | None) -> Sequence[SyncStats]:
        watch = asyncio.ensure_future(self._pass_on_abort(decision))
        try:
            return await self._session.receive(delta)
        finally:
            watch.cancel()

    async def _pass_on_abort(self, decision: CommitDecision) -> None:
        """End the session's `receive` if the controller aborts the update, or can no longer be asked."""
        reason: str | None = None
        while not reason:
            await asyncio.sleep(ABORT_POLL_SECONDS)
            try:
                reason = await asyncio.to_thread(decision.read)
            except WeightSyncError as e:
                reason = str(e)
        await self._session.abort_update(reason)

    async def _wait_decided(self, decision: CommitDecision) -> str:
        """Return why the controller aborts the update; empty if it does not."""
        start = time.monotonic()
        while (reason := await asyncio.to_thread(decision.read)) is None:
            self._session.check_open()
            waited = time.monotonic() - start
            if waited > self._session.sync_seconds:
                raise WeightSyncError(f"the controller did not decide within {self._session.sync_seconds:g} s")
            await asyncio.sleep(min(max(MIN_POLL_SECONDS, POLL_SHARE * waited), MAX_POLL_SECONDS))
        return reason
