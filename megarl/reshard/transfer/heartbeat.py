"""Heartbeats of the ranks of a sync, and the abort of a sync on all ranks, through a TCP store.

    every rank    RankHeartbeat   a thread that writes what the rank does, and aborts its transport on an abort
    controller    SyncMonitor     a thread that reads all heartbeats during a sync, and aborts it if a rank is missing

Over NCCL, a lost rank is noticed by nobody and an abort by the rank that aborts alone. The store carries both: the
first rank that fails, or the monitor, writes why, and every rank reads it at its next beat.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType

from torch._C._distributed_c10d import PrefixStore, Store

from megarl.reshard.transfer.commit_decision import StoreSpec, first_line

BEATS = 8
"""Heartbeats within `abort_seconds`."""

BUSY_LIMITS = 3
"""A rank that lives and waits for no other rank may hold the others up for this many times `abort_seconds`: it may load
tensors, or wait for its engine."""

MAX_NAMED = 8
"""Ranks that a heartbeat names."""

_ABORT = "abort"


@dataclass(frozen=True, slots=True)
class HeartbeatSpec(StoreSpec):
    """Where the ranks of a sync leave their heartbeats.

    The name is that of a set of connections: an abort is final, and what a failed one has left is not read.
    """

    abort_seconds: float = 10.0
    """A sync is aborted if a rank gives no sign of life, or all ranks wait for each other, for this long."""

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats."""
        return self.abort_seconds / BEATS

    def open(self) -> Store:
        """Connect to the store; raises WeightSyncError if it does not answer."""
        return self.within(self.connect())

    def within(self, store: Store) -> Store:
        """Return the part of a store in which the heartbeats are."""
        return PrefixStore(f"{self.name} heartbeats", store)


@dataclass(slots=True)
class SyncActivity:
    """What a rank does, for the other ranks and the controller."""

    num_syncs: int = 0
    """Number of syncs that the rank has begun."""
    is_active: bool = False
    """Whether a sync is running."""
    progress: int = 0
    """Number of works that have completed."""
    waits_for: tuple[int, ...] = ()
    """Ranks that the rank waits for, at most `MAX_NAMED`; empty while it waits for none."""


class RankHeartbeat:
    """The heartbeat of one rank, from the connecting of its transport until that is closed or aborted."""

    def __init__(self, spec: HeartbeatSpec, rank: int, activity: SyncActivity, abort: Callable[[str], None]) -> None:
        """Write the first heartbeat and start the thread; raises WeightSyncError if the store does not answer.

        Args:
            activity: what the rank does; read at every beat.
            abort: called in the thread with the reason, at most once.
        """
        self._spec, self._rank, self._activity, self._abort = spec, rank, activity, abort
        self._store, self._beats = spec.open(), 0
        self._failure, self._is_closed, self._wake = "", False, threading.Event()
        self._last_contact, self._cut_off_since = time.monotonic(), 0.0
        self._beat()
        threading.Thread(target=self._run, name="weight-sync-heartbeat", daemon=True).start()

    def report_failure(self, reason: str) -> None:
        """Abort the sync on all ranks; returns at once."""
        self._failure = reason
        self._wake.set()

    def close(self) -> None:
        """End the thread, after it has passed on a failure."""
        self._is_closed = True
        self._wake.set()

    @property
    def is_cut_off(self) -> bool:
        """Whether the store has not answered for `abort_seconds`, so that an abort would not be seen."""
        now = time.monotonic()
        if now - self._last_contact <= self._spec.abort_seconds:
            self._cut_off_since = 0.0
            return False
        self._cut_off_since = self._cut_off_since or now
        return now - self._cut_off_since > 2 * self._spec.interval  # the process may have been stopped itself

    def _run(self) -> None:
        try:
            while True:
                is_closed = self._is_closed  # before the failure is read, which is reported first
                self._beat()
                if self._failure:
                    self._store.compare_set(_ABORT, "", self._failure)
                if self._store.check([_ABORT]):
                    self._abort(self._store.get(_ABORT).decode())
                    return
                self._last_contact = time.monotonic()
                if is_closed:
                    return
                self._wake.wait(self._spec.interval)
                self._wake.clear()
        except RuntimeError as e:
            self._abort(f"the store of the sync at {self._spec.host}:{self._spec.port} has ended ({first_line(e)})")

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(_key(self._rank), json.dumps(asdict(self._activity) | {"beat": self._beats}))


class HeartbeatTracker:
    """Finds the ranks that are missing from a sequence of observed heartbeats."""

    def __init__(self, size: int, abort_seconds: float, interval: float) -> None:
        """`interval`: planned seconds between two observations; of a longer pause, two of them count."""
        self._limit, self._longest = abort_seconds, 2 * interval
        self._last: float | None = None
        self._beats = [-1] * size
        self._silent_seconds = [0.0] * size
        self._progress: list[tuple[int, bool, int]] = []
        self._stuck_seconds = 0.0

    def observe(self, heartbeats: Sequence[bytes], now: float) -> str:
        """Return why the sync has to be aborted, naming ranks; empty if it does not.

        Args:
            heartbeats: the latest of each rank.
            now: seconds of a clock.
        """
        passed = 0.0 if self._last is None else min(now - self._last, self._longest)
        self._last = now
        states = [json.loads(heartbeat) for heartbeat in heartbeats]
        beats = [int(state.pop("beat")) for state in states]
        pairs = zip(beats, self._beats, self._silent_seconds, strict=True)
        self._silent_seconds = [seconds + passed if beat == last else 0.0 for beat, last, seconds in pairs]
        self._beats = beats
        activities = [SyncActivity(**state) for state in states]
        progress = [(each.num_syncs, each.is_active, each.progress) for each in activities]
        self._stuck_seconds = self._stuck_seconds + passed if progress == self._progress else 0.0
        self._progress = progress
        silent = [rank for rank, seconds in enumerate(self._silent_seconds) if seconds >= self._limit]
        if silent:
            return f"{list_ranks(silent)} gave no sign of life for {self._limit:g} s"
        active = [each for each in activities if each.is_active]
        have_begun = len({each.num_syncs for each in activities}) == 1
        limit = self._limit if all(each.waits_for for each in active) else BUSY_LIMITS * self._limit
        if have_begun and active and self._stuck_seconds >= limit:
            return f"no rank made progress for {limit:g} s: {_describe(activities)}"
        return ""


def _describe(activities: Sequence[SyncActivity]) -> str:
    """Return which rank holds the others up, or else who waits for whom."""
    active = [rank for rank, each in enumerate(activities) if each.is_active]
    busy = [rank for rank in active if not activities[rank].waits_for]
    if busy:
        return f"the others wait for {list_ranks(busy)}"
    least = min(activities[rank].progress for rank in active)
    behind = [rank for rank in active if activities[rank].progress == least]
    return "; ".join(f"rank {rank} waits for {list_ranks(activities[rank].waits_for)}" for rank in behind[:4])


class SyncMonitor:
    """Watches the heartbeats of all ranks while it is entered, and aborts the sync if a rank is missing."""

    def __init__(self, spec: HeartbeatSpec, store: Store) -> None:
        """Watch the ranks of `spec`, which have all connected; `store`: that of `spec`, in the process that owns it."""
        self._spec, self._store, self._stopped = spec, spec.within(store), threading.Event()
        self._thread = threading.Thread(target=self._run, name="weight-sync-monitor", daemon=True)

    def __enter__(self) -> SyncMonitor:
        """Start the thread that watches the heartbeats."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching; if the block raised, abort the sync on all ranks."""
        self._stopped.set()
        self._thread.join()
        if error is not None:
            self.abort(first_line(error))

    def abort(self, reason: str) -> None:
        """Abort the sync on all ranks, unless it is aborted for another reason."""
        self._store.compare_set(_ABORT, "", reason)

    def _run(self) -> None:
        keys = [_key(rank) for rank in range(self._spec.size)]
        tracker = HeartbeatTracker(self._spec.size, self._spec.abort_seconds, self._spec.interval)
        while not self._stopped.wait(self._spec.interval):
            if not self._store.check(keys):
                continue  # a rank has not connected, which has a timeout of its own
            if reason := tracker.observe(self._store.multi_get(keys), time.monotonic()):
                self.abort(reason)
                return


def list_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks as text: `rank 3`, `ranks 1, 2`."""
    listed = sorted(set(ranks))
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def _key(rank: int) -> str:
    return f"rank {rank}"
