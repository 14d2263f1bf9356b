"""A transport over gloo that follows NCCL's rules: the CPU counterpart of a transport over NCCL.

A plan that runs over gloo can wait forever over NCCL, which a test over plain gloo does not show. This
transport moves bytes over gloo and imposes the rules that NCCL and torch's `ProcessGroupNCCL` have:

    one stream per communicator   A rank's group of messages starts when its previous group has ended, and ends when
                                  all its messages have been matched by groups that run on the other ranks.
    connecting                    The first group of a communicator needs every rank of it, also those that have no
                                  messages; `connect` does that in advance.
    memory                        Data is read and written while the group runs, not when it is posted.
    lost ranks                    A dead or aborted rank is not noticed: groups that need it run until they are aborted.
    abort                         Local: it ends this rank's groups, and no other rank notices.
    watchdog                      Unless the communicator handles errors itself, a group that is not done in time takes
                                  the process down with SIGABRT.

One rule is stricter than NCCL, which may complete small messages through its own buffers before the receiver has posted
them: here a group always waits for its peers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.transfer.transport import (
    Deadline,
    InFlight,
    Message,
    Transport,
    close_gloo_connections,
    wait_for,
    wait_for_gloo,
)

_NEVER = timedelta(days=1)
"""Timeout of the waits within gloo; a group ends before only if it has completed or was aborted."""

_DATA, _CONNECT = 0, 1
"""Gloo tags of messages, and of the bytes that connect a communicator."""

_JOIN_SECONDS = 10.0


class StreamWork:
    """A group of operations on a communicator's stream; has the methods of a torch work that transports use."""

    def __init__(self, changed: threading.Condition) -> None:
        """Start the work's clock; `changed` is notified when the work ends."""
        self.started_at = time.monotonic()
        self.is_done = False
        self.error = ""
        """Why the work has failed; empty if it has not."""
        self._changed = changed

    def is_completed(self) -> bool:
        """Return whether the work has ended; it may have failed."""
        return self.is_done or bool(self.error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the work has ended.

        Args:
            timeout: counted from the work's start, as `ProcessGroupNCCL` does. A timeout marks the work as failed, at
                which the watchdog ends the process unless the communicator handles errors itself. None: failures
                are not reported, since such a wait over NCCL only orders the GPU's streams.

        Raises:
            RuntimeError: `timeout` is given, and the work has failed or was aborted.
        """
        with self._changed:
            left = None if timeout is None else self.started_at + timeout.total_seconds() - time.monotonic()
            if not self._changed.wait_for(self.is_completed, left):
                self.fail(f"not done {time.monotonic() - self.started_at:.1f} s after its start")
            if self.error and timeout is not None:
                raise RuntimeError(f"the group of messages failed: {self.error}")
        return True

    def wait_until_ended(self, timeout: timedelta | None = None) -> bool:
        """Return whether the work has ended within `timeout` from now on, which `ProcessGroupNCCL` does not offer.

        Raises:
            RuntimeError: the work has failed or was aborted.
        """
        with self._changed:
            has_ended = self._changed.wait_for(self.is_completed, None if timeout is None else timeout.total_seconds())
            if self.error:
                raise RuntimeError(f"the group of messages failed: {self.error}")
        return has_ended

    def fail(self, error: str) -> None:
        """Mark the work as failed; the caller holds the lock of `changed`."""
        self.error = error
        self._changed.notify_all()


class StreamCommunicator:
    """This rank's part of a communicator: a stream that runs groups of operations one after another over gloo."""

    def __init__(self, group: Any, *, is_connected: bool = False, watchdog_seconds: float | None = None) -> None:
        """Use a gloo process group that nothing else uses.

        Args:
            group: a torch `ProcessGroup` with gloo, or a `ProcessGroupGloo`.
            is_connected: whether all ranks have connected before; if not, the first operation needs all of them.
            watchdog_seconds: the process is killed with SIGABRT if an operation is not done this long after it was
                posted; None: the caller handles errors, as with `TORCH_NCCL_ASYNC_ERROR_HANDLING=0`.
        """
        self._group, self._is_connected, self._watchdog_seconds = group, is_connected, watchdog_seconds
        self._changed = threading.Condition()
        self._queue: deque[tuple[StreamWork, Callable[[], bool]]] = deque()
        """Works that have not ended, and the functions that run them; the first may be running."""
        self._is_aborted = False
        self._threads: list[threading.Thread] = []

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> StreamWork:
        """Post a group of point-to-point messages; peers are numbered as in the process group."""
        return self._post(lambda: self._exchange(sends, receives))

    def connect(self) -> StreamWork:
        """Post the connecting of all ranks, an operation without data in which every rank takes part."""
        return self._post(lambda: True)

    def _post(self, run: Callable[[], bool]) -> StreamWork:
        with self._changed:
            work = StreamWork(self._changed)
            if self._is_aborted:
                raise RuntimeError("the communicator was aborted")
            self._queue.append((work, run))
            self._changed.notify_all()
            if not self._threads:
                loops = [self._execute] if self._watchdog_seconds is None else [self._execute, self._watch]
                # daemons, which never keep the process from exiting
                self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
                for thread in self._threads:
                    thread.start()
        return work

    def abort(self) -> None:
        """Fail the posted operations; when this returns, none of them reads or writes memory any more."""
        with self._changed:
            is_first, self._is_aborted = not self._is_aborted, True
            for work, _ in self._queue:
                work.fail("the communicator was aborted")
            self._queue.clear()
            self._changed.notify_all()
        if is_first and self._threads:
            close_gloo_connections(self._group)
            for thread in self._threads:
                thread.join(_JOIN_SECONDS)

    def _execute(self) -> None:
        """Run the operations one after another; return if the communicator is aborted."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_aborted or self._queue)
                if self._is_aborted:
                    return
                work, run = self._queue[0]
            has_completed = self._connect() and run()
            with self._changed:
                if not has_completed:  # a peer is lost; a kernel would run on
                    self._changed.wait_for(lambda: self._is_aborted)
                if self._is_aborted:
                    return
                self._queue.popleft()
                work.is_done = True
                self._changed.notify_all()
            del work, run  # references to tensors

    def _connect(self) -> bool:
        if not self._is_connected:
            others = [rank for rank in range(self._group.size()) if rank != self._group.rank()]
            sends = [(torch.zeros(1, dtype=torch.uint8), rank) for rank in others]
            receives = [(torch.zeros(1, dtype=torch.uint8), rank) for rank in others]
            self._is_connected = self._run(sends, receives, _CONNECT)
        return self._is_connected

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> bool:
        """Exchange the messages of one group; return False if a peer was lost. Subclasses may make it take longer."""
        return self._run(sends, receives, _DATA)

    def _run(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> bool:
        """Exchange the messages; return False if a peer was lost.

        Data is received into memory of its own, because gloo may write into it after an abort.
        """
        arriving = [(torch.empty_like(tensor), tensor, rank) for tensor, rank in receives]
        received = [(_begin(self._group.recv, data, rank, tag), data, tensor) for data, tensor, rank in arriving]
        sent = [_begin(self._group.send, tensor, rank, tag) for tensor, rank in sends]
        for work, data, tensor in received:
            if not self._has_completed(work):
                return False
            with self._changed:
                if self._is_aborted:
                    return False
                tensor.copy_(data)
        return all(self._has_completed(work) for work in sent)

    def _has_completed(self, work: dist.Work | None) -> bool:
        """Wait for a gloo message; return False if the connection to the peer is broken, or after an abort."""
        try:
            return work is not None and wait_for_gloo(work, _NEVER, lambda: self._is_aborted)
        except RuntimeError:
            return False

    def _watch(self) -> None:
        """End the process if an operation has failed or is not done in time."""
        assert self._watchdog_seconds is not None
        with self._changed:
            while not self._is_aborted:
                oldest = self._queue[0][0] if self._queue else None
                if oldest is None:
                    self._changed.wait()
                    continue
                left = oldest.started_at + self._watchdog_seconds - time.monotonic()
                if left <= 0 or any(work.error for work, _ in self._queue):
                    reason = oldest.error or f"not done {self._watchdog_seconds:g} s after its start"
                    os.write(2, f"watchdog: a group of messages failed: {reason}; the process is aborted\n".encode())
                    os.kill(os.getpid(), signal.SIGABRT)
                self._changed.wait(max(left, 0.0))


class NcclOrderTransport(Transport):
    """A `Transport` over gloo with NCCL's rules, for messages and for all-gathers; see the module."""

    def __init__(
        self,
        group: Any,
        timeout_seconds: float | None = None,
        *,
        is_connected: bool = False,
        watchdog_seconds: float | None = None,
    ) -> None:
        """Use a gloo process group that nothing else uses; `close` aborts it.

        Args:
            group: a torch `ProcessGroup` with gloo, or a `ProcessGroupGloo`.
            timeout_seconds: timeout of a sync, as for `Transport`.
            is_connected: as for `StreamCommunicator`; applies to the groups of all-gathers too.
            watchdog_seconds: as for `StreamCommunicator`.
        """
        super().__init__(group, timeout_seconds=timeout_seconds, is_exclusive=True, coalesces=True)
        self._is_connected, self._watchdog_seconds = is_connected, watchdog_seconds
        self._communicators: dict[Any, StreamCommunicator] = {}

    def connect(self) -> None:
        """Connect all ranks, in which every rank takes part.

        Raises:
            WeightSyncError: another rank did not connect within `timeout_seconds`.
        """
        others = tuple(rank for rank in range(self._group.size()) if rank != self._group.rank())
        try:
            work = self._communicator(self._group).connect()
            wait_for([InFlight(work, others, True, self, is_polled=True)], Deadline(self.timeout_seconds))
        except (RuntimeError, WeightSyncError) as e:
            rank = self._group.rank()
            self.close()
            raise WeightSyncError(f"rank {rank} could not connect to the other ranks: {e}") from e

    def _begin_gathers(self, gathers: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> list[InFlight]:
        """Start all-gathers as `Transport._begin_gathers` does, on the stream of the group's own communicator."""
        ranks, me = dist.get_process_group_ranks(group), group.rank()
        others = [member for member in range(group.size()) if member != me]
        peers = tuple(ranks[member] for member in others)
        communicator = self._communicator(group)
        started = []
        for out, mine in gathers:
            parts = out.view(group.size(), -1)
            if parts[me].data_ptr() != mine.data_ptr():
                parts[me].copy_(mine)
            sends = [(mine, member) for member in others]
            receives = [(parts[member], member) for member in others]
            work = self._post(communicator, sends, receives)
            started.append(InFlight(work, peers, True, self, is_polled=True))
        return started

    def _end_works(self, *, gathers: bool) -> None:
        """Abort the communicators of this rank, which no other rank notices."""
        del gathers  # nothing else uses their groups
        for communicator in self._communicators.values():
            communicator.abort()

    def _start_coalesced(
        self, group: Any, sends: Sequence[Message], receives: Sequence[Message]
    ) -> tuple[list[InFlight], list[InFlight]]:
        peers = tuple(sorted({rank for _, rank in (*receives, *sends)}))
        work = self._post(self._communicator(group), sends, receives)
        combined = InFlight(work, peers, bool(receives), self, is_polled=True)
        return [combined], [combined]

    def _post(
        self, communicator: StreamCommunicator, sends: Sequence[Message], receives: Sequence[Message]
    ) -> StreamWork:
        try:
            return communicator.post(sends, receives)
        except RuntimeError as e:
            self.raise_if_aborted()
            raise WeightSyncError(str(e)) from e

    def _communicator(self, group: Any) -> StreamCommunicator:
        communicator = self._communicators.get(group)
        if communicator is None:
            communicator = self._communicators[group] = self._make_communicator(group)
        return communicator

    def _make_communicator(self, group: Any) -> StreamCommunicator:
        return StreamCommunicator(group, is_connected=self._is_connected, watchdog_seconds=self._watchdog_seconds)


def _begin(
    call: Callable[[list[Tensor], int, int], dist.Work], tensor: Tensor, rank: int, tag: int
) -> dist.Work | None:
    """Start a gloo message; return None if the connection to the peer is broken."""
    try:
        return call([tensor], rank, tag)
    except RuntimeError:
        return None
