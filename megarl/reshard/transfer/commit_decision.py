"""The decision of the controller whether engines serve the weights that they have received.

    controller                       store                     engine hosts
                                     received: 1, 2, ... n <-- report_received: the engine has all weights
    has_everyone_received <--------- received = n
    decide ------------------------> "commit", or why not -----> read: serve the weights, or abort the update

All engines change to a version only after all have received all of it. The messages go through the TCP store that the
ranks' heartbeats use, so that a weight sync takes one call of each engine instead of one for each phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megarl.errors import WeightSyncError

CONNECT_SECONDS = 30.0
"""Timeout of connecting to a store, and of a call to it."""


def open_store(host: str) -> TCPStore:
    """Open a store in this process, on any free port, for a rendezvous; it closes with the object."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Where some processes exchange messages through a store; plain data."""

    host: str
    port: int
    name: str
    """Unique in the run."""
    size: int
    """Number of processes that take part."""

    def connect(self) -> TCPStore:
        """Connect, which takes longer than a message; raises WeightSyncError if the store does not answer."""
        try:
            return TCPStore(self.host, self.port, timeout=timedelta(seconds=CONNECT_SECONDS))
        except (RuntimeError, ValueError) as e:
            raise WeightSyncError(f"the store at {self.host}:{self.port} does not answer: {first_line(e)}") from e


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


T = TypeVar("T")

_RECEIVED, _DECISION = "received", "decision"
_BYTES_SENT, _BYTES_RECEIVED = "bytes sent", "bytes received"

_COMMIT = "commit"

RECEIVED_SECONDS = 0.02
"""Longest wait of `has_everyone_received`, for engines that report at about the same time as the trainer ranks."""

RECEIVED_POLL_SECONDS = 0.001
"""How often it reads the store, which is in the same process."""


@dataclass(frozen=True, slots=True)
class CommitSpec(StoreSpec):
    """Where the engines of one update find its decision."""


@dataclass(frozen=True, slots=True)
class TransferredBytes:
    """What some ranks have transferred over the network."""

    bytes_sent: int = 0
    bytes_received: int = 0


class CommitDecision:
    """One process's view of the decision about one update. Every method raises WeightSyncError if the store ends."""

    def __init__(self, spec: CommitSpec, store: Store) -> None:
        """`store`: connected to the store of `spec`, or the store itself in the process that owns it."""
        self._spec, self._store = spec, PrefixStore(spec.name, store)

    def report_received(self, transferred: TransferredBytes) -> None:
        """Report that an engine has received all weights; `transferred`: what its ranks sent and received."""
        self._call(lambda store: store.add(_BYTES_SENT, transferred.bytes_sent))
        self._call(lambda store: store.add(_BYTES_RECEIVED, transferred.bytes_received))
        self._call(lambda store: store.add(_RECEIVED, 1))

    def transferred(self) -> TransferredBytes:
        """Return what the ranks of all engines have sent and received, as far as reported."""
        sent, received = (self._add_nothing(key) for key in (_BYTES_SENT, _BYTES_RECEIVED))
        return TransferredBytes(sent, received)

    def has_everyone_received(self) -> bool:
        """Return True once all engines have received all weights, or False after `RECEIVED_SECONDS`."""
        end = time.monotonic() + RECEIVED_SECONDS
        while self._add_nothing(_RECEIVED) < self._spec.size:
            if time.monotonic() > end:
                return False
            time.sleep(RECEIVED_POLL_SECONDS)
        return True

    def decide(self, reason: str = "") -> None:
        """Decide that the engines serve the weights or, given a reason, abort the update; the first call counts."""
        self._call(lambda store: store.compare_set(_DECISION, "", reason or _COMMIT))

    def read(self) -> str | None:
        """Return why the update is aborted, empty if its weights are to be served; None if that is undecided."""
        if not self._call(lambda store: store.check([_DECISION])):
            return None
        decision: str = self._call(lambda store: store.get(_DECISION)).decode()
        return "" if decision == _COMMIT else decision

    def _add_nothing(self, key: str) -> int:
        count: int = self._call(lambda store: store.add(key, 0))
        return count

    def _call(self, method: Callable[[Store], T]) -> T:
        try:
            return method(self._store)
        except RuntimeError as e:
            raise WeightSyncError(f"the store of the sync at {self._spec.host}:{self._spec.port} has ended") from e
