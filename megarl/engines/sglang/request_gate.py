"""Limits the requests that SGLang has at a time to those for which its KV cache has room.

    requests of all workers --> waiting, by (priority, arrival) --> at SGLang, at most `limit` --> completions
                                                  KV cache almost full, or requests retracted: limit falls
                                                  room in the KV cache, and requests wait: limit rises

SGLang admits requests before it knows how long they become. If its KV cache gets full, it retracts some: it discards
their keys and values, and computes them again later. A request in SGLang's own queue cannot be overtaken either, so
that the queue is kept short.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

LOOK_SECONDS = 0.5
"""Time between two looks at the load of SGLang."""

HIGH_USAGE = 0.95
"""Share of the KV cache in use from which the limit falls."""

LOW_USAGE = 0.85
"""Share of the KV cache in use below which the limit may rise."""

DECREASE = 0.85
"""Factor by which the limit falls."""

INCREASE_SHARE = 8
"""The limit rises by 1 / INCREASE_SHARE of itself at a look."""

QUEUE_SHARE = 8
"""SGLang's queue may have 1 / QUEUE_SHARE of the limit, so that SGLang need not wait for the next request."""

QUEUE_LOOKS = 10
"""Number of looks after which the requests that were in SGLang's queue at all of them are too many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangLoad:
    """The load of SGLang's scheduler at one time."""

    timestamp: float
    """Unix time at which the scheduler has reported it."""
    num_queued: int
    """Requests in the scheduler's queue."""
    num_retracted: int
    """Requests that were retracted lately, because the KV cache was full."""
    kv_usage: float
    """Share of the KV cache that running requests use."""
    kv_tokens: int
    """Size of the KV cache in tokens."""
    max_running: int
    """Largest number of requests that may run at a time."""


class ConcurrencyLimit:
    """The number of requests that SGLang may have: falls by a factor, rises in steps."""

    def __init__(self, load: SglangLoad, tokens_per_request: int) -> None:
        """Begin with the requests that fit into the KV cache for certain.

        Args:
            tokens_per_request: largest number of tokens, the prompt included, that a request may come to.
        """
        self._max = load.max_running + _share(load.max_running, QUEUE_SHARE)
        self.value = min(self._max, max(1, load.kv_tokens // tokens_per_request))
        self._num_queued: deque[int] = deque(maxlen=QUEUE_LOOKS)

    def update(self, load: SglangLoad, *, num_sent: int, is_waiting: bool) -> None:
        """Adapt the limit to a new load.

        Args:
            num_sent: requests that SGLang has; more than the limit until some have ended after it has fallen.
            is_waiting: whether others wait for the limit.
        """
        self._num_queued.append(load.num_queued)
        room = _share(self.value, QUEUE_SHARE)
        surplus = min(self._num_queued) - room if len(self._num_queued) == QUEUE_LOOKS else 0
        if load.num_retracted or load.kv_usage >= HIGH_USAGE:
            if num_sent <= self.value:
                self.value = max(1, int(DECREASE * num_sent))
        elif surplus > 0:
            self.value = max(1, min(self.value, num_sent - surplus))
        elif is_waiting and load.num_queued <= room and load.kv_usage < LOW_USAGE:
            self.value = min(self._max, self.value + _share(self.value, INCREASE_SHARE))


@dataclass(slots=True, eq=False)
class Ticket:
    """The place of a request at the gate."""

    priority: int
    max_tokens: int
    """Largest number of tokens, the prompt included, that the request may come to."""
    number: int
    """Order of arrival."""
    is_admitted: bool = False
    """Whether it counts against the limit."""
    is_withdrawn: bool = False
    turn: asyncio.Future[None] | None = None
    """Resolved when it need not wait longer; None if it does not wait."""


class RequestGate:
    """The requests of one engine that wait for SGLang, and the number of those that it has."""

    def __init__(self, read_load: Callable[[], SglangLoad | None]) -> None:
        """`read_load`: returns the latest load of SGLang; None if it is not known yet, and requests do not wait."""
        self._read_load = read_load
        self._limit: ConcurrencyLimit | None = None
        self._last_load = 0.0
        """Timestamp of the load that the limit was last adapted to."""
        self._numbers = itertools.count()
        self._waiting: list[tuple[bool, int, int, Ticket]] = []
        """A heap: admitted requests, which were held for an update, then by falling priority, then by arrival."""
        self._num_tickets = self.num_admitted = self.num_waiting = 0
        self._is_open = True
        self._timer: asyncio.TimerHandle | None = None

    @property
    def limit(self) -> int | None:
        """Number of requests that SGLang may have at a time; None before the first one."""
        return None if self._limit is None else self._limit.value

    def register(self, priority: int, max_tokens: int) -> Ticket:
        """Return the place of a new request, which `leave` gives back."""
        self._num_tickets += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        return Ticket(priority, max_tokens, next(self._numbers))

    async def wait_turn(self, ticket: Ticket) -> bool:
        """Wait until the request may be sent to SGLang; return False if it is withdrawn.

        A request that has been sent keeps its place, so that it waits for nothing but an open gate.
        """
        while (ticket.is_admitted or not ticket.is_withdrawn) and not self._admit(ticket):
            ticket.turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (not ticket.is_admitted, -ticket.priority, ticket.number, ticket))
            self.num_waiting += 1
            try:
                await ticket.turn
            finally:
                self.num_waiting -= 1
                ticket.turn = None
        return not ticket.is_withdrawn

    def withdraw(self, ticket: Ticket) -> None:
        """End the request's wait for the limit; one that SGLang has had ends once the gate is open."""
        ticket.is_withdrawn = True
        if not ticket.is_admitted and ticket.turn is not None and not ticket.turn.done():
            ticket.turn.set_result(None)

    def leave(self, ticket: Ticket) -> None:
        """Give the request's place to the next one."""
        self._num_tickets -= 1
        self.num_admitted -= ticket.is_admitted
        self._admit_next()

    def close(self) -> None:
        """Let all requests wait until `open`; those that SGLang has keep their places."""
        self._is_open = False

    def open(self) -> None:
        """Let requests pass as far as the limit allows."""
        self._is_open = True
        self._admit_next()

    def _admit(self, ticket: Ticket) -> bool:
        """Whether the request may be sent; it then counts against the limit."""
        if not self._is_open:
            return False
        if not ticket.is_admitted:
            if self._limit is None and (load := self._read_load()) is not None:
                self._limit = ConcurrencyLimit(load, ticket.max_tokens)
            if self._limit is not None and self.num_admitted >= self._limit.value:
                return False
            ticket.is_admitted = True
            self.num_admitted += 1
        return True

    def _admit_next(self) -> None:
        while self._waiting:
            *_, ticket = self._waiting[0]
            if ticket.turn is not None and not ticket.turn.done():
                if not self._admit(ticket):
                    return
                ticket.turn.set_result(None)
            heapq.heappop(self._waiting)

    def _look(self) -> None:
        """Adapt the limit to the load, and look again later if there are requests."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_SECONDS, self._look) if self._num_tickets else None
        load = self._read_load()
        if self._limit is None or load is None or load.timestamp == self._last_load:
            return
        self._last_load = load.timestamp
        self._limit.update(load, num_sent=self.num_admitted, is_waiting=self.num_waiting > 0)
        self._admit_next()


def _share(number: int, share: int) -> int:
    return max(1, number // share)
