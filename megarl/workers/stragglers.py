"""Which rank holds up the others: the one that works longest, while the others wait for it.

How long a call takes says nothing about that, because ranks end it together, in a collective. What counts is how long a
rank worked in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter, thread_time
from typing import Any

KEPT = 1000
"""Records of a process that are kept until somebody takes them; older ones are dropped."""

FACTOR = 1.3
LEAST_SECONDS = 0.1
"""By which a straggler works longer than the others, at least: below, that is noise."""

STEPS_IN_A_ROW = 5


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call of a worker's method."""

    role: str
    method: str
    seconds: float
    """From begin to end."""
    worked: float
    """Of them, those in which the rank did not wait: the calling thread's CPU seconds.

    On a GPU they mislead: a thread that waits for a kernel spins, and one that only launches kernels works little. A
    worker that has an attribute `busy_seconds`, which adds up what it worked by its own account (until its gradients
    are ready, say), is believed instead.
    """


class CallLog:
    """Of one process, whose calls run one at a time on one thread."""

    def __init__(self) -> None:
        self._records: deque[CallRecord] = deque(maxlen=KEPT)

    @contextmanager
    def call(self, role: str, method: str, worker: Any) -> Iterator[None]:
        """The block is the call; one that fails is not recorded."""
        busy = getattr(worker, "busy_seconds", None)
        began, worked_before = perf_counter(), thread_time()
        yield
        worked = thread_time() - worked_before if busy is None else worker.busy_seconds - busy
        self._records.append(CallRecord(role, method, perf_counter() - began, worked))

    def take(self) -> list[CallRecord]:
        """Those since the last time."""
        records = list(self._records)
        self._records.clear()
        return records


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that worked longest in a phase, of those that do the same."""

    phase: str
    """`<role>.<method>`."""
    rank: int
    seconds: float
    median_seconds: float
    """Of the others."""

    @property
    def ratio(self) -> float:
        """How many times the median."""
        return self.seconds / self.median_seconds

    def holds_up(self, factor: float) -> bool:
        """Whether that is worth a word."""
        return self.ratio > factor and self.seconds - self.median_seconds > LEAST_SECONDS


def slowest_by_phase(
    records: Sequence[Sequence[CallRecord]], *, stages: Sequence[int] | None = None
) -> list[Straggler]:
    """Of each phase the rank that worked longest, also where that is nothing to speak of.

    Args:
        records: by rank.
        stages: by rank, its pipeline stage, where these do different work; a rank that is alone in its stage has no
            others to be compared with.
    """
    worked: dict[tuple[str, int], dict[int, float]] = {}
    for rank, of_rank in enumerate(records):
        for record in of_rank:
            ranks = worked.setdefault((f"{record.role}.{record.method}", stages[rank] if stages else 0), {})
            ranks[rank] = ranks.get(rank, 0.0) + record.worked
    found: dict[str, Straggler] = {}
    for (phase, _), ranks in worked.items():
        if len(ranks) < 2:
            continue
        rank = max(ranks, key=lambda each: ranks[each])
        others = median(seconds for each, seconds in ranks.items() if each != rank)
        if others <= 0:
            continue
        one = Straggler(phase=phase, rank=rank, seconds=ranks[rank], median_seconds=others)
        if phase not in found or one.ratio > found[phase].ratio:
            found[phase] = one
    return list(found.values())


def slowest(
    records: Sequence[Sequence[CallRecord]], *, factor: float = FACTOR, stages: Sequence[int] | None = None
) -> list[Straggler]:
    """The ranks that hold up the others, one a phase at most; see `slowest_by_phase`."""
    return [one for one in slowest_by_phase(records, stages=stages) if one.holds_up(factor)]


class StragglerWatch:
    """Follows the ranks of some processes from step to step."""

    def __init__(
        self, nodes: Sequence[str], say: Callable[[str], None], *, stages: Sequence[int] | None = None
    ) -> None:
        """Args:
        nodes: by rank, where it is.
        say: tells the user a line: once about a rank in a phase that was the slowest for `STEPS_IN_A_ROW` steps.
        stages: see `slowest_by_phase`.
        """
        self._nodes, self._say, self._stages = nodes, say, stages
        self._rows: dict[str, tuple[int, int]] = {}
        self._told: set[tuple[str, int]] = set()

    def step(self, records: Sequence[Sequence[CallRecord]]) -> dict[str, float]:
        """The step's metrics: `straggler/<role>.<method>_ratio`, of the slowest rank to the median of the others.

        Of phases that cost so little that ratios are noise there is none.
        """
        phases = slowest_by_phase(records, stages=self._stages)
        late = {one.phase: one for one in phases if one.holds_up(FACTOR)}
        self._rows = {
            phase: (one.rank, self._rows[phase][1] + 1 if self._rows.get(phase, (None, 0))[0] == one.rank else 1)
            for phase, one in late.items()
        }
        for phase, (rank, steps) in self._rows.items():
            if steps >= STEPS_IN_A_ROW and (phase, rank) not in self._told:
                self._told.add((phase, rank))
                role, method = phase.split(".", 1)
                self._say(
                    f"{role} rank {rank} (node {self._nodes[rank]}) takes {late[phase].ratio:.1f} times the median in "
                    f"{method}, for {STEPS_IN_A_ROW} steps now"
                )
        return {f"straggler/{one.phase}_ratio": one.ratio for one in phases if one.seconds > LEAST_SECONDS}
