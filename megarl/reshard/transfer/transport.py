"""Messages between the ranks of a plan, counted, with a deadline for all waits of a sync.

    trainer ranks only              torch's default group, or that of `make_sync_transport`
    trainer ranks and engine ranks  a group of otherwise unrelated processes, see `connect_group`

A failed wait leaves the group unusable. Over gloo, a rank whose sync failed closes its connections, which ends the
waits of the other ranks. Over NCCL an abort is local: the other ranks wait until they are aborted or time out.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megarl.errors import LostRankError, WeightSyncError
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.heartbeat import MAX_NAMED, HeartbeatSpec, RankHeartbeat, SyncActivity, list_ranks

AT_ONCE = timedelta(milliseconds=1)
"""Shortest timeout of a wait."""

_CLOSING = 2**31 - 1
"""Gloo tag that no message has."""


def coalesced(group: dist.ProcessGroup, device: torch.device | None = None) -> AbstractContextManager[Any]:
    """Context manager that combines collectives of the same kind into one call; its value has their `works` at the end.

    torch has no public name for it; its own FSDP uses this one.

    Args:
        device: device of the tensors, for collectives that backends have no coalesced form of (broadcasts).
    """
    manager: AbstractContextManager[Any] = distributed_c10d._coalescing_manager(group, device, async_ops=True)
    return manager


def abort_group(group: dist.ProcessGroup) -> None:
    """Abort a process group: over gloo, that also ends the waits of the other ranks."""
    if dist.get_backend(group) == "gloo":
        close_gloo_connections(group)
    else:
        group.abort()


def close_gloo_connections(group: Any) -> None:
    """Close this rank's connections, which fails all waits on them, here and on the other ranks.

    `ProcessGroupGloo.abort` does nothing, but gloo closes all connections when a wait times out. A wait for a peer
    whose connection is already broken fails without that, so one peer is not enough.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _CLOSING).wait(AT_ONCE)


Message = tuple[Tensor, int]
"""The data of a point-to-point message, and the rank at the other end."""

_POLL_SECONDS = 2e-5, 1e-3
"""First and longest pause between two looks at a work; the pauses double."""

_ABORT_SECONDS = 0.2
"""How often a wait over gloo looks whether it was aborted."""

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
        return None if self._end is None else max(timedelta(seconds=self._end - time.monotonic()), AT_ONCE)


@dataclass(slots=True)
class InFlight:
    """A started message, or several that complete together."""

    work: Any
    """A torch work, or an object with the same methods."""
    peers: tuple[int, ...]
    """Ranks at the other end, numbered as in the plan."""
    is_receive: bool
    transport: Transport
    """The transport that started the message."""
    arrived: bool = False
    """Set once waited for: a second wait on a gloo work would wait for another message."""
    is_polled: bool = False
    """Ask the work whether it has completed, instead of waiting for it: a wait with a timeout, which torch counts from
    the start of NCCL's work, marks the work as failed, for which torch's watchdog may end the process."""


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
        self._group: Any = dist.group.WORLD if group is None else group
        self._coalesces = coalesces
        self.is_exclusive = is_exclusive
        """Whether nothing else uses the group."""
        self.timeout_seconds, self._closed = timeout_seconds, False
        self.stats = SyncStats()
        """What has been sent and received; a sync starts with new ones."""
        self.activity = SyncActivity()
        self.abort_reason = ""
        """Why the sync was aborted on all ranks; empty if it was not."""
        self._heartbeat: RankHeartbeat | None = None
        self._gather_groups: set[Any] = set()
        self._ending = threading.Lock()

    def start_heartbeat(self, spec: HeartbeatSpec, rank: int) -> None:
        """Give signs of life until the transport is closed.

        If the store does not answer, close the transport and raise WeightSyncError.
        """
        try:
            self._heartbeat = RankHeartbeat(spec, rank, self.activity, self.abort)
        except WeightSyncError:
            self.close()
            raise

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Mark a sync as running; if it fails, abort it on all ranks."""
        self.activity.num_syncs += 1
        self.activity.is_active = True
        try:
            yield
        except BaseException as e:
            self.activity.is_active = False
            if self._heartbeat is not None:
                self._heartbeat.report_failure(str(e) or type(e).__name__)
            self.close()
            raise
        finally:
            self.activity.is_active, self.activity.waits_for = False, ()

    def abort(self, reason: str) -> None:
        """End all works of this rank with the error `reason`; other threads than the one that waits may call it."""
        with self._ending:
            if self._closed or self.abort_reason:
                return
            self.abort_reason = reason
            self._end_works(gathers=True)

    def raise_if_aborted(self) -> None:
        """Raise LostRankError if the sync was aborted, or if an abort could not be noticed."""
        if self.abort_reason:
            raise LostRankError(f"the sync was aborted: {self.abort_reason}")
        if self._heartbeat is not None and self._heartbeat.is_cut_off:
            raise LostRankError("the store of the sync does not answer")

    def connect(self) -> None:
        """Connect all ranks, in which every rank has to take part; returns when all have.

        If one has not within `timeout_seconds`, close the transport and raise WeightSyncError.
        """
        group = self._group
        others = tuple(rank for rank in range(group.size()) if rank != group.rank())
        device = torch.device("cuda", torch.cuda.current_device()) if self._is_coalescing() else torch.device("cpu")
        try:
            work = group.allreduce([torch.zeros(1, dtype=torch.uint8, device=device)])
            message = InFlight(work, others, True, self, is_polled=self._is_coalescing())
            wait_for([message], Deadline(self.timeout_seconds))
        except (RuntimeError, WeightSyncError) as e:
            self.close()
            raise WeightSyncError(f"rank {group.rank()} could not connect to the other ranks: {e}") from e

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[InFlight], list[InFlight]]:
        """Start all messages together, and count them.

        Return the works to wait for until everything is received, and until everything is sent. Raises WeightSyncError
        if the transport is closed or a connection is broken.

        Args:
            sends: (tensor, destination rank) per message.
            receives: (tensor, source rank) per message.
        """
        self.stats.bytes_sent += sum([tensor.nbytes for tensor, _ in sends])
        self.stats.bytes_received += sum([tensor.nbytes for tensor, _ in receives])
        self.stats.messages += len(receives)
        if self._closed:
            raise WeightSyncError("the connections were closed when a sync failed: the ranks have to connect again")
        self.raise_if_aborted()
        if not sends and not receives:
            return [], []
        start = self._start_coalesced if self._is_coalescing() else self._begin_all
        return start(self._group, sends, receives)

    def _begin_all(
        self, group: Any, sends: Sequence[Message], receives: Sequence[Message]
    ) -> tuple[list[InFlight], list[InFlight]]:
        """Start messages over gloo, none of them after an abort: on closed connections they would never end."""
        with self._ending:
            self.raise_if_aborted()
            received = [self._begin(group.recv, tensor, rank, is_receive=True) for tensor, rank in receives]
            sent = [self._begin(group.send, tensor, rank, is_receive=False) for tensor, rank in sends]
            return received, sent

    def _begin(
        self, call: Callable[[list[Tensor], int, int], dist.Work], tensor: Tensor, rank: int, *, is_receive: bool
    ) -> InFlight:
        try:
            return InFlight(call([tensor], rank, 0), (rank,), is_receive, self)
        except RuntimeError as e:
            self.raise_if_aborted()
            raise _lost((rank,), e) from e

    def _is_coalescing(self) -> bool:
        if self._coalesces is None:
            self._coalesces = dist.get_backend(self._group) == "nccl"
        return self._coalesces

    def _start_coalesced(
        self, group: Any, sends: Sequence[Message], receives: Sequence[Message]
    ) -> tuple[list[InFlight], list[InFlight]]:
        device: torch.device = (*receives, *sends)[0][0].device
        peers = tuple(sorted({rank for _, rank in (*receives, *sends)}))
        try:
            group._start_coalescing(device)
            for tensor, rank in receives:
                group.recv([tensor], rank, 0)
            for tensor, rank in sends:
                group.send([tensor], rank, 0)
            work = group._end_coalescing(device)
        except RuntimeError as e:
            self.raise_if_aborted()
            raise _lost(peers, e) from e
        combined = InFlight(work, peers, bool(receives), self, is_polled=True)
        return [combined], [combined]

    def start_all_gathers(self, gathers: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> list[InFlight]:
        """Start several all-gathers, each given as (output, this rank's share), and count them.

        The output receives the shares of all members in rank order; this rank's share may be a view of it.
        """
        for out, mine in gathers:
            self.stats.bytes_sent += out.nbytes - mine.nbytes
            self.stats.bytes_received += out.nbytes - mine.nbytes
            self.stats.collectives += 1
        self._gather_groups.add(group)
        return self._begin_gathers(gathers, group)

    def _begin_gathers(self, gathers: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> list[InFlight]:
        """Start all-gathers: over NCCL in one call, over gloo as messages with the shares of all of them.

        Torch's all-gather for gloo would allocate a second output and copy it.
        """
        ranks, me = dist.get_process_group_ranks(group), group.rank()
        others = [member for member in range(group.size()) if member != me]
        if dist.get_backend(group) != "gloo":
            peers = tuple(ranks[member] for member in others)
            with coalesced(group) as started:
                for out, mine in gathers:
                    dist.all_gather_into_tensor(out, mine, group=group, async_op=True)
            return [InFlight(work, peers, True, self, is_polled=True) for work in started.works]
        sends, receives = [], []
        for out, mine in gathers:
            parts = out.view(group.size(), -1)
            if parts[me].data_ptr() != mine.data_ptr():
                parts[me].copy_(mine)
            sends += [(mine, member) for member in others]
            receives += [(parts[member], member) for member in others]
        received, sent = self._begin_all(group, sends, receives)
        return [replace(each, peers=tuple(ranks[member] for member in each.peers)) for each in (*received, *sent)]

    def start_broadcasts(self, broadcasts: Sequence[tuple[Tensor, int]], group: dist.ProcessGroup) -> list[InFlight]:
        """Start several broadcasts, each given as (tensor, global rank of its source), and count them.

        All members pass the same.
        """
        if not broadcasts:
            return []
        ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
        others = tuple(rank for rank in ranks if rank != me)
        for tensor, source in broadcasts:
            if source == me:
                self.stats.bytes_sent += tensor.nbytes * len(others)
            else:
                self.stats.bytes_received += tensor.nbytes
            self.stats.collectives += 1
        if dist.get_backend(group) != "gloo":
            with coalesced(group, broadcasts[0][0].device) as started:
                for tensor, source in broadcasts:
                    dist.broadcast(tensor, source, group=group, async_op=True)
            return [InFlight(work, others, True, self, is_polled=True) for work in started.works]
        started_works = []
        for tensor, source in broadcasts:
            work = dist.broadcast(tensor, source, group=group, async_op=True)
            assert work is not None, "this rank is not in the group"
            peers = others if source == me else (source,)
            started_works.append(InFlight(work, peers, source != me, self))
        return started_works

    @property
    def is_closed(self) -> bool:
        """Whether the transport has been closed or aborted."""
        return self._closed or bool(self.abort_reason)

    def close(self) -> None:
        """Close the transport, and abort an exclusive group: over gloo, that ends the waits of the other ranks."""
        with self._ending:
            if not self._closed and not self.abort_reason:
                self._end_works(gathers=False)
            if self._heartbeat is not None and not self.activity.is_active:  # else `syncing` has to report a failure
                self._heartbeat.close()
            self._group, self._closed = None, True

    def _end_works(self, *, gathers: bool) -> None:
        """End the works of this rank, if nothing else uses the group."""
        if not self.is_exclusive:
            return
        for group in (self._group, *(self._gather_groups if gathers else ())):
            if self._is_coalescing():
                group.abort()
            else:
                close_gloo_connections(group)


@contextmanager
def closed_on_failure(transport: Transport, gather_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Close the transport, and abort the group of all-gathers, if the block raises: both are unusable then."""
    try:
        yield
    except BaseException:
        transport.close()
        if gather_group is not None:
            abort_group(gather_group)
        raise


def wait_for(messages: Iterable[InFlight], deadline: Deadline) -> None:
    """Wait until all messages have completed.

    If a connection broke, the deadline passed or the sync was aborted, the WeightSyncError names the ranks waited for.
    """
    late: list[InFlight] = []
    for message in messages:
        if message.arrived:
            continue
        activity = message.transport.activity
        activity.waits_for = message.peers[:MAX_NAMED]
        try:
            message.arrived = _wait(message, deadline)
        except RuntimeError as e:
            message.transport.raise_if_aborted()
            if not deadline.is_expired:
                raise _lost(message.peers, e) from e
        if message.arrived:
            activity.progress, activity.waits_for = activity.progress + 1, ()
        else:
            late.append(message)
    if late:
        silent = [message for message in late if message.is_receive]
        ranks = list_ranks({rank for message in silent or late for rank in message.peers})
        limit = f"within {deadline.seconds:g} s"
        raise WeightSyncError(f"nothing from {ranks} {limit}" if silent else f"{ranks} took nothing {limit}")


def _wait(message: InFlight, deadline: Deadline) -> bool:
    """Return whether the message completed before the deadline; raises RuntimeError if it failed."""
    transport, left = message.transport, deadline.remaining
    if not message.is_polled:
        if not transport.is_exclusive:
            return bool(message.work.wait() if left is None else message.work.wait(left))
        return wait_for_gloo(message.work, left, transport.raise_if_aborted)
    pause, longest = _POLL_SECONDS
    while not message.work.is_completed():
        transport.raise_if_aborted()
        if deadline.is_expired:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return bool(message.work.wait(AT_ONCE))  # with a timeout, as NCCL's wait does not report failures without one


class _Waiter:
    """A thread that waits for messages, one at a time."""

    idle: ClassVar[list[_Waiter]] = []

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], bool], Future[bool]]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="gloo wait").start()

    def submit(self, call: Callable[[], bool]) -> Future[bool]:
        """Return what will be the result of `call`, or the RuntimeError that it raises."""
        result: Future[bool] = Future()
        self._calls.put((call, result))
        return result

    def _run(self) -> None:
        while True:
            call, result = self._calls.get()
            try:
                result.set_result(call())
            except RuntimeError as e:
                result.set_exception(e)
            del call, result  # references to tensors
            self.idle.append(self)


def wait_for_gloo(work: dist.Work, left: timedelta | None, is_aborted: Callable[[], bool | None]) -> bool:
    """Wait for a message over gloo until it has completed or the sync is aborted; return whether it has completed.

    If a connection breaks, or is closed, gloo ends no wait for a message that is partly read or written. Such a wait is
    left to a thread of its own until `left` has passed; until then gloo keeps the memory of the message.

    Args:
        left: longest wait, after which gloo closes all connections of the group and raises RuntimeError, as for a
            broken one; None: the timeout of the process group.
        is_aborted: returns whether the sync is aborted, or raises; called every `_ABORT_SECONDS`.
    """
    try:
        waiter = _Waiter.idle.pop()
    except IndexError:
        waiter = _Waiter()
    result = waiter.submit(work.wait if left is None else partial(work.wait, left))
    while not is_aborted():
        with suppress(TimeoutError):
            return bool(result.result(_ABORT_SECONDS))
    return False


def _lost(peers: Iterable[int], error: RuntimeError) -> LostRankError:
    words = _GLOO_NOISE.sub("", str(error).splitlines()[0])
    return LostRankError(f"lost the connection to {list_ranks(peers)} ({words})")
