"""A barrier for the boxes of one round, which independent senders deliver, one per TP rank.

sender of rank 0 -- part of round 7 --.
sender of rank 1 -- part of round 7 ---+--> execute(7, parts) -- the same result --> every sender
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from megarl.errors import MegarlError, WeightSyncError
from megarl.reshard.transfer.bucket import BoxBucket

Parts = list[BoxBucket | None]
"""Parts of one round by TP rank; None: the rank has no boxes."""


@dataclass
class _Round:
    answer: asyncio.Future[None]
    timer: asyncio.TimerHandle
    parts: dict[int, BoxBucket | None] = field(default_factory=dict)


class RoundBarrier:
    """Barrier of one weight update; must be used in one event loop."""

    def __init__(
        self, num_ranks: int, timeout_seconds: float, execute: Callable[[int, Parts], Awaitable[None]]
    ) -> None:
        """`execute` is called with a round's index and parts as soon as all parts have arrived."""
        self._num_ranks, self._timeout, self._execute = num_ranks, timeout_seconds, execute
        self._rounds: dict[int, _Round] = {}
        self._arrived: set[tuple[int, int]] = set()
        self._running: set[asyncio.Task[None]] = set()

    async def arrive(self, rank: int, index: int, part: BoxBucket | None) -> None:
        """Deliver the part of `rank` and wait until the round has been executed; its error is raised in every sender.

        Raises:
            WeightSyncError: a rank's part did not arrive in time, or arrived twice.
        """
        if not 0 <= rank < self._num_ranks:
            raise WeightSyncError(f"the engine has TP ranks 0 to {self._num_ranks - 1}, got boxes for rank {rank}")
        if (index, rank) in self._arrived:
            raise WeightSyncError(f"round {index} of TP rank {rank} arrived twice")
        self._arrived.add((index, rank))
        this = self._rounds.get(index) or self._open(index)
        this.parts[rank] = part
        if len(this.parts) == self._num_ranks:
            del self._rounds[index]
            this.timer.cancel()
            task = asyncio.ensure_future(self._run(index, this))  # continues if this sender is cancelled
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await asyncio.shield(this.answer)

    def abort(self, error: MegarlError) -> None:
        """Fail the rounds that are incomplete."""
        rounds, self._rounds = self._rounds, {}
        for this in rounds.values():
            this.timer.cancel()
            _fail(this.answer, error)

    def _open(self, index: int) -> _Round:
        loop = asyncio.get_running_loop()
        self._rounds[index] = _Round(loop.create_future(), loop.call_later(self._timeout, self._time_out, index))
        return self._rounds[index]

    def _time_out(self, index: int) -> None:
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
        except Exception as e:  # noqa: BLE001 -- raised in every sender
            _fail(this.answer, e)
        else:
            this.answer.set_result(None)


def _fail(answer: asyncio.Future[None], error: Exception) -> None:
    answer.set_exception(error)
    answer.exception()  # marks it as retrieved: all senders may have been cancelled
