"""Brings together what independent senders bring for the same round, one per TP rank.

sender of rank 0 -- part of round 7 --.
sender of rank 1 -- part of round 7 ---+--> execute(7, parts) -- the same answer --> every sender
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from megarl.errors import MegarlError, WeightSyncError
from megarl.reshard.transfer.bucket import BoxBucket

Parts = list[BoxBucket | None]
"""By TP rank."""


@dataclass
class _Round:
    answer: asyncio.Future[None]
    timer: asyncio.TimerHandle
    parts: dict[int, BoxBucket | None] = field(default_factory=dict)


class Rendezvous:
    """Belongs to one event loop, and to one update of weights."""

    def __init__(
        self, num_ranks: int, timeout_seconds: float, execute: Callable[[int, Parts], Awaitable[None]]
    ) -> None:
        """`execute` is called with each round's number and parts once they are all there."""
        self._num_ranks, self._timeout, self._execute = num_ranks, timeout_seconds, execute
        self._rounds: dict[int, _Round] = {}
        self._brought: set[tuple[int, int]] = set()
        self._running: set[asyncio.Task[None]] = set()

    async def bring(self, rank: int, index: int, part: BoxBucket | None) -> None:
        """Return once the round has been executed; its failure is raised in every sender.

        Raises:
            WeightSyncError: a rank's part did not come in time, or one came twice.
        """
        if not 0 <= rank < self._num_ranks:
            raise WeightSyncError(f"the engine has TP ranks 0 to {self._num_ranks - 1}, got boxes for rank {rank}")
        if (index, rank) in self._brought:
            raise WeightSyncError(f"round {index} of TP rank {rank} came twice")
        self._brought.add((index, rank))
        this = self._rounds.get(index) or self._open(index)
        this.parts[rank] = part
        if len(this.parts) == self._num_ranks:
            del self._rounds[index]
            this.timer.cancel()
            task = asyncio.ensure_future(self._run(index, this))  # goes on if this sender is cancelled
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await asyncio.shield(this.answer)

    def dismiss(self, error: MegarlError) -> None:
        """Fail the rounds that are not whole."""
        rounds, self._rounds = self._rounds, {}
        for this in rounds.values():
            this.timer.cancel()
            _fail(this.answer, error)

    def _open(self, index: int) -> _Round:
        loop = asyncio.get_running_loop()
        self._rounds[index] = _Round(loop.create_future(), loop.call_later(self._timeout, self._give_up, index))
        return self._rounds[index]

    def _give_up(self, index: int) -> None:
        this = self._rounds.pop(index)
        missing = [str(rank) for rank in range(self._num_ranks) if rank not in this.parts]
        error = WeightSyncError(
            f"round {index} of the weights did not come from TP rank {', '.join(missing)} of {self._num_ranks} "
            f"within {self._timeout:g} s"
        )
        _fail(this.answer, error)

    async def _run(self, index: int, this: _Round) -> None:
        try:
            await self._execute(index, [this.parts[rank] for rank in range(self._num_ranks)])
        except Exception as e:  # noqa: BLE001 -- raised again in every sender
            _fail(this.answer, e)
        else:
            this.answer.set_result(None)


def _fail(answer: asyncio.Future[None], error: Exception) -> None:
    answer.set_exception(error)
    answer.exception()  # senders may all have been cancelled
