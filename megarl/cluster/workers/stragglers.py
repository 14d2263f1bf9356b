"""Ranks that others wait for: the one that works longest, and the stacks of those that hang.

The duration of a call does not show this, because the ranks finish together, in a collective. What counts is how long
each rank was busy in it. Only ranks that do the same work are compared: those of one pipeline stage, in calls whose
`Dispatch` declares equal work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.process.stack_dump import ProcessInfo, Stacks, read_stacks
from megarl.cluster.workers.failures import results_in_time, wait_all

MAX_CALLS = 100
"""Maximum number of calls whose timing is held; older ones are dropped."""

STRAGGLER_FACTOR = 1.3
"""A straggler is busy for more than this many times the median of the other ranks."""

MIN_EXCESS_SECONDS = 0.1
"""A straggler is busy for longer than the median of the others by more than this; smaller differences are noise."""

MIN_CONSECUTIVE_STEPS = 5
"""A straggler is reported after so many steps in a row."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """The timing of one call of a worker's method."""

    role: str
    method: str
    seconds: float
    """Duration of the call."""
    busy_seconds: float
    """The part of `seconds` in which the rank did not wait.

    If the worker has an attribute `busy_seconds` that is not None, it is a counter, and this is its increase: Megatron
    ranks on GPUs count the GPU time of their forward passes (`ForwardWorker.busy_seconds`). Otherwise this is the CPU
    time of the calling thread, in which ranks on CPUs compute. On a GPU, CPU time misleads: a thread that waits for a
    kernel spins, and a thread that only launches kernels uses little of it.
    """
    stage: int = 0
    """Pipeline stage of the rank in the role's layout."""


class CallTime(NamedTuple):
    """The timing of a call on one rank, which returns with its result; see `CallRecord`."""

    seconds: float
    busy_seconds: float


def timed_call(worker: Any, method: str, argument: Any) -> tuple[Any, CallTime]:
    """Return `method(argument)` of the worker, and the timing of the call."""
    busy = getattr(worker, "busy_seconds", None)
    began, cpu_before = perf_counter(), thread_time()
    result = getattr(worker, method)(argument)
    busy_seconds = thread_time() - cpu_before if busy is None else worker.busy_seconds - busy
    return result, CallTime(perf_counter() - began, busy_seconds)


class CallLog:
    """The timing of the calls with equal work on the processes of a pool."""

    def __init__(self) -> None:
        self._calls: deque[tuple[str, str, Sequence[int], Sequence[CallTime]]] = deque(maxlen=MAX_CALLS)

    def add(self, role: str, method: str, stages: Sequence[int], times: Sequence[CallTime]) -> None:
        """Add a call; `stages` and `times`: pipeline stage and timing of each rank."""
        self._calls.append((role, method, stages, times))

    def take(self, num_ranks: int) -> list[list[CallRecord]]:
        """Return the records of each rank since the last call of this and drop them."""
        records: list[list[CallRecord]] = [[] for _ in range(num_ranks)]
        for role, method, stages, times in self._calls:
            for of_rank, stage, time in zip(records, stages, times, strict=True):
                of_rank.append(CallRecord(role, method, time.seconds, time.busy_seconds, stage))
        self._calls.clear()
        return records


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that was busy longest in a phase, among the ranks that do the same work."""

    phase: str
    """Name of the phase: `<role>.<method>`."""
    rank: int
    seconds: float
    """Busy time of the rank."""
    median_seconds: float
    """Median busy time of the other ranks."""

    @property
    def ratio(self) -> float:
        """`seconds` as a multiple of `median_seconds`."""
        return self.seconds / self.median_seconds

    @property
    def is_significant(self) -> bool:
        """Whether the rank exceeds `STRAGGLER_FACTOR` times the median, by more than `MIN_EXCESS_SECONDS`."""
        return self.ratio > STRAGGLER_FACTOR and self.seconds - self.median_seconds > MIN_EXCESS_SECONDS


def slowest_by_phase(records: Sequence[Sequence[CallRecord]]) -> list[Straggler]:
    """Return the busiest rank of each phase, whether or not the difference is significant.

    Args:
        records: call records of each rank. Ranks are compared within their stage; a rank that is alone in its stage is
            left out.
    """
    busy_seconds: dict[tuple[str, int], dict[int, float]] = {}
    for rank, rank_records in enumerate(records):
        for record in rank_records:
            ranks = busy_seconds.setdefault((f"{record.role}.{record.method}", record.stage), {})
            ranks[rank] = ranks.get(rank, 0.0) + record.busy_seconds
    found: dict[str, Straggler] = {}
    for (phase, _), ranks in busy_seconds.items():
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


class StragglerMonitor:
    """Tracks the stragglers of a worker group from step to step and reports persistent ones."""

    def __init__(self, nodes: Sequence[str], notify: Callable[[str], None]) -> None:
        """Args:
        nodes: host name of each rank.
        notify: gets a message once for each rank and phase in which it was the straggler for
            `MIN_CONSECUTIVE_STEPS` steps in a row.
        """
        self._nodes, self._notify = nodes, notify
        self._streaks: dict[str, tuple[int, int]] = {}
        self._reported: set[tuple[str, int]] = set()

    def step(self, records: Sequence[Sequence[CallRecord]]) -> dict[str, float]:
        """Return the step's metrics: `straggler/<role>.<method>_ratio`, busy time of the slowest rank over the median.

        Phases in which the slowest rank is busy for at most `MIN_EXCESS_SECONDS` have no metric.
        """
        phases = slowest_by_phase(records)
        late = {one.phase: one for one in phases if one.is_significant}
        self._streaks = {
            phase: (one.rank, self._streaks[phase][1] + 1 if self._streaks.get(phase, (None, 0))[0] == one.rank else 1)
            for phase, one in late.items()
        }
        for phase, (rank, steps) in self._streaks.items():
            if steps >= MIN_CONSECUTIVE_STEPS and (phase, rank) not in self._reported:
                self._reported.add((phase, rank))
                role, method = phase.split(".", 1)
                self._notify(
                    f"{role} rank {rank} (node {self._nodes[rank]}) was busy {late[phase].ratio:.1f} times as long as "
                    f"the median in {method}, for {MIN_CONSECUTIVE_STEPS} steps in a row"
                )
        return {f"straggler/{one.phase}_ratio": one.ratio for one in phases if one.seconds > MIN_EXCESS_SECONDS}


COLLECT_TIMEOUT_SECONDS = 30.0


def query_processes(hosts: Mapping[str, Any], timeout: float | None = None) -> dict[str, ProcessInfo]:
    """Return host and pid of the processes of these (async) worker hosts, by name; call it while they answer.

    Raises:
        WorkerError: a process died or did not answer within `timeout` seconds.
    """
    refs = {name: worker_host.process_info.remote() for name, worker_host in hosts.items()}
    names = {ref: name for name, ref in refs.items()}
    return dict(zip(refs, wait_all(list(names), what="start", names=names, timeout=timeout), strict=True))


def find_processes(hosts: Mapping[str, Any], timeout: float) -> dict[str, ProcessInfo]:
    """Return host and pid of those of these worker hosts that answer within `timeout` seconds, by name."""
    names = {worker_host.process_info.remote(): name for name, worker_host in hosts.items()}
    return {names[ref]: info for ref, info in results_in_time(names, timeout).items()}


def collect_stacks(processes: Mapping[str, ProcessInfo], timeout: float = COLLECT_TIMEOUT_SECONDS) -> str:
    """Return the stacks of these processes and of their descendants as text, after at most `timeout` seconds.

    The text starts with one line per process that names the function its main thread is in. Processes that cannot be
    read are listed with the reason.
    """
    by_node: dict[str, dict[str, ProcessInfo]] = {}
    for name, info in processes.items():
        by_node.setdefault(info.node_id, {})[name] = info
    task = ray.remote(read_stacks)
    refs = []
    for node_id, node_processes in by_node.items():
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = task.options(num_cpus=0, max_retries=0, scheduling_strategy=here)
        # the other half of the time is for starting the task's process on a busy node
        refs.append(options.remote(node_processes, timeout / 2))
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=timeout)
    found = [
        _result_or_reason(ref, node_processes, timeout)
        for ref, node_processes in zip(refs, by_node.values(), strict=True)
    ]
    lines = [line for each in found for line in each.summary_lines]
    return "\n".join([*lines, "", *(each.text for each in found)])


def _result_or_reason(ref: Any, node_processes: Mapping[str, ProcessInfo], timeout: float) -> Stacks:
    host = next(iter(node_processes.values())).host
    if not ray.wait([ref], timeout=0)[0]:
        ray.cancel(ref)
        return Stacks(
            summary_lines=(f"{host}: no stacks within {timeout:g} s of {', '.join(node_processes)}",), text=""
        )
    try:
        found: Stacks = ray.get(ref)
    except RayError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Stacks(summary_lines=(f"{host}: no stacks of {', '.join(node_processes)}: {reason}",), text="")
    return found
