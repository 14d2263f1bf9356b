"""Messages between the ranks of a plan, and how long a rank waits for them.

    trainer ranks alone             torch's default group, or one of `make_group`
    trainer ranks and engine ranks  a group of processes that share nothing else, see `join_group`

A wait that fails leaves the group unusable: gloo closes every connection of a rank that has given up, and so tells the
others, who would wait for it otherwise.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import LostRankError, WeightSyncError

_AT_ONCE = timedelta(milliseconds=1)

_GLOO_NOISE = re.compile(r"^\[\S+\] |\. This is typically caused by .*$")
"""Around what happened: the line of its source, and advice."""


class Deadline:
    """When a rank stops waiting; one for all of a sync."""

    def __init__(self, seconds: float | None) -> None:
        """From now; None: as long as the group itself waits."""
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """True from then on."""
        return self._end is not None and time.monotonic() >= self._end

    @property
    def left(self) -> timedelta | None:
        """At least a millisecond: what is there already is still taken."""
        return None if self._end is None else max(timedelta(seconds=self._end - time.monotonic()), _AT_ONCE)


@dataclass(slots=True)
class InFlight:
    """A message, or several that end together."""

    work: dist.Work
    peers: tuple[int, ...]
    """Ranks of the plan at the other end."""
    is_receive: bool
    arrived: bool = False
    """It has been waited for: gloo would wait for another message if it was asked again."""


class Wire:
    """Carries messages over one process group, whose ranks are those of the plan."""

    def __init__(
        self, group: Any = None, *, timeout_seconds: float | None = None, own: bool = False, joins: bool | None = None
    ) -> None:
        """Over a torch `ProcessGroup`, or one of its backends alone; None: torch's default group.

        Args:
            timeout_seconds: how long a sync may take; None: each message as long as the group waits.
            own: nobody else uses the group: it may be broken to tell the other ranks of a failure.
            joins: the backend takes the messages of one call as one, and answers for all of them, as NCCL does; None:
                ask torch.distributed, which has made the group.
        """
        self._group, self._own, self._joins = group, own, joins
        self.timeout_seconds, self._closed = timeout_seconds, False

    def start(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> tuple[list[InFlight], list[InFlight]]:
        """Start all of them together; tensors with the other rank of each.

        Returns:
            What to wait for until everything has been received, and until everything has been sent.

        Raises:
            WeightSyncError: a connection is broken already.
        """
        if self._closed:
            raise WeightSyncError("the ranks' connections were closed when a sync failed, they need new ones")
        if not sends and not receives:
            return [], []
        group: Any = dist.group.WORLD if self._group is None else self._group
        if self._joins is None:
            self._joins = dist.get_backend(group) == "nccl"
        if self._joins:
            return self._start_joined(group, sends, receives)
        received = [InFlight(_begin(group.recv, tensor, rank), (rank,), True) for tensor, rank in receives]
        sent = [InFlight(_begin(group.send, tensor, rank), (rank,), False) for tensor, rank in sends]
        return received, sent

    def _start_joined(
        self, group: Any, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> tuple[list[InFlight], list[InFlight]]:
        device: torch.device = (*receives, *sends)[0][0].device
        group._start_coalescing(device)
        for tensor, rank in receives:
            _begin(group.recv, tensor, rank)
        for tensor, rank in sends:
            _begin(group.send, tensor, rank)
        work = group._end_coalescing(device)
        whole = InFlight(work, tuple(sorted({rank for _, rank in (*receives, *sends)})), bool(receives))
        return [whole], [whole]

    @property
    def closed(self) -> bool:
        """True once it carries nothing any more."""
        return self._closed

    def close(self) -> None:
        """Carry nothing any more. Breaks the connections if nobody else uses them: the other ranks stop waiting."""
        if self._own and not self._closed:
            self._group.abort()
        self._group, self._closed = None, True


def wait_for(messages: Iterable[InFlight], deadline: Deadline) -> None:
    """Return once all of them have arrived.

    Raises:
        WeightSyncError: names the ranks that were waited for.
    """
    late: list[InFlight] = []
    for message in messages:
        if message.arrived:
            continue
        left = deadline.left
        try:
            message.arrived = message.work.wait() if left is None else message.work.wait(left)
        except RuntimeError as e:
            if not deadline.passed:
                raise _lost(message.peers, e) from e
        if not message.arrived:
            late.append(message)
    if late:
        silent = [message for message in late if message.is_receive]
        ranks = _ranks({rank for message in silent or late for rank in message.peers})
        limit = f"within {deadline.seconds:g} s"
        raise WeightSyncError(f"nothing from {ranks} {limit}" if silent else f"{ranks} took nothing {limit}")


def _begin(call: Any, tensor: Tensor, rank: int) -> dist.Work:
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
