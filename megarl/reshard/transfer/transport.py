"""Point-to-point messages between the ranks of a plan, with a deadline for all waits of a sync.

    trainer ranks only              torch's default group, or one of `make_sync_group`
    trainer ranks and engine ranks  a group of otherwise unrelated processes, see `connect_group`

A failed wait leaves the group unusable: gloo closes all connections of a rank whose wait failed, which notifies the
other ranks; they would otherwise keep waiting.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import LostRankError, WeightSyncError

_AT_ONCE = timedelta(milliseconds=1)

_GLOO_NOISE = re.compile(r"^\[\S+\] |\. This is typically caused by .*$")
"""Parts of gloo's messages that are removed: the source line and generic advice."""


class Deadline:
    """The time at which a rank stops waiting; one deadline covers all waits of a sync."""

    def __init__(self, seconds: float | None) -> None:
        """Start the timer; None: no deadline other than the process group's own timeout."""
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def is_expired(self) -> bool:
        """Whether the deadline has passed."""
        return self._end is not None and time.monotonic() >= self._end

    @property
    def remaining(self) -> timedelta | None:
        """Time left, at least one millisecond so that messages that have already arrived are still received."""
        return None if self._end is None else max(timedelta(seconds=self._end - time.monotonic()), _AT_ONCE)


@dataclass(slots=True)
class InFlight:
    """A started message, or several that complete together."""

    work: dist.Work
    peers: tuple[int, ...]
    """Ranks at the other end, numbered as in the plan."""
    is_receive: bool
    arrived: bool = False
    """Set once waited for: a second wait on a gloo work would wait for another message."""


class Transport:
    """Sends and receives messages over one process group, whose ranks are numbered as in the plan."""

    def __init__(
        self,
        group: Any = None,
        *,
        timeout_seconds: float | None = None,
        is_exclusive: bool = False,
        coalesces: bool | None = None,
    ) -> None:
        """Use a process group.

        Args:
            group: a torch `ProcessGroup`, or one of its backends; None: torch's default group.
            timeout_seconds: timeout of a sync; None: the group's timeout applies to each message.
            is_exclusive: nothing else uses the group, so it may be aborted to notify the other ranks of a failure.
            coalesces: the backend combines the messages of one call into one work, as NCCL does; None: derive it from
                the backend that torch.distributed reports for the group.
        """
        self._group, self._is_exclusive, self._coalesces = group, is_exclusive, coalesces
        self.timeout_seconds, self._closed = timeout_seconds, False

    def start(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> tuple[list[InFlight], list[InFlight]]:
        """Start all messages together.

        Args:
            sends: (tensor, destination rank) per message.
            receives: (tensor, source rank) per message.

        Returns:
            The works to wait for until everything is received, and until everything is sent.

        Raises:
            WeightSyncError: the transport is closed, or a connection is broken.
        """
        if self._closed:
            raise WeightSyncError("the connections were closed when a sync failed: the ranks have to connect again")
        if not sends and not receives:
            return [], []
        group: Any = dist.group.WORLD if self._group is None else self._group
        if self._coalesces is None:
            self._coalesces = dist.get_backend(group) == "nccl"
        if self._coalesces:
            return self._start_coalesced(group, sends, receives)
        received = [InFlight(_begin(group.recv, tensor, rank), (rank,), True) for tensor, rank in receives]
        sent = [InFlight(_begin(group.send, tensor, rank), (rank,), False) for tensor, rank in sends]
        return received, sent

    def _start_coalesced(
        self, group: Any, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> tuple[list[InFlight], list[InFlight]]:
        device: torch.device = (*receives, *sends)[0][0].device
        group._start_coalescing(device)
        for tensor, rank in receives:
            _begin(group.recv, tensor, rank)
        for tensor, rank in sends:
            _begin(group.send, tensor, rank)
        work = group._end_coalescing(device)
        combined = InFlight(work, tuple(sorted({rank for _, rank in (*receives, *sends)})), bool(receives))
        return [combined], [combined]

    @property
    def is_closed(self) -> bool:
        """Whether the transport has been closed."""
        return self._closed

    def close(self) -> None:
        """Close the transport. An exclusive group is aborted, which ends the waits of the other ranks."""
        if self._is_exclusive and not self._closed:
            self._group.abort()
        self._group, self._closed = None, True


def wait_for(messages: Iterable[InFlight], deadline: Deadline) -> None:
    """Wait until all messages have completed.

    Raises:
        WeightSyncError: a connection broke or the deadline passed; names the ranks waited for.
    """
    late: list[InFlight] = []
    for message in messages:
        if message.arrived:
            continue
        left = deadline.remaining
        try:
            message.arrived = message.work.wait() if left is None else message.work.wait(left)
        except RuntimeError as e:
            if not deadline.is_expired:
                raise _lost(message.peers, e) from e
        if not message.arrived:
            late.append(message)
    if late:
        silent = [message for message in late if message.is_receive]
        ranks = _ranks({rank for message in silent or late for rank in message.peers})
        limit = f"within {deadline.seconds:g} s"
        raise WeightSyncError(f"nothing from {ranks} {limit}" if silent else f"{ranks} took nothing {limit}")


def _begin(call: Callable[[list[Tensor], int, int], dist.Work], tensor: Tensor, rank: int) -> dist.Work:
    try:
        work: dist.Work = call([tensor], rank, 0)
    except RuntimeError as e:
        raise _lost((rank,), e) from e
    return work


def _lost(peers: Iterable[int], error: RuntimeError) -> LostRankError:
    words = _GLOO_NOISE.sub("", str(error).splitlines()[0])
    return LostRankError(f"lost the connection to {_ranks(peers)} ({words})")


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(set(ranks))
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
