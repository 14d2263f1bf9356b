"""Worker groups without Ray: every rank of a torch.distributed world runs the same program (SPMD).

All ranks make the same calls in the same order. Each rank runs its own part of a call, and all ranks get the result.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.process.process_start import freeze_objects
from megarl.cluster.workers.dispatch import Dispatch, LocalPayload
from megarl.errors import MegarlError, WorkerError

A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")

IDLE_TIMEOUT = timedelta(days=1)
"""Timeout of a collective: one rank may work while the others wait. If a rank dies, the wait fails at once."""


class SpmdWorld:
    """The ranks of torch.distributed's default group, which this process has joined; satisfies `Processes`.

    Creating it is collective: all ranks do so together.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)

    def group(self, name: str, grid: RankGrid) -> SpmdGroup[Any]:
        """Return a group for role `name` in these ranks."""
        return SpmdGroup(name, self, grid)

    def gather(self, value: T) -> list[T]:
        """All-gather: return the `value` of each rank, in rank order, on every rank."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def any(self, flag: bool) -> bool:
        """All-reduce: return on every rank whether `flag` is True on any rank."""
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def broadcast_from_rank0(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def run_on_rank0(self, make: Callable[[], T]) -> T:
        """Run `make` on rank 0; return its result, or raise its `MegarlError`, on every rank."""
        outcome: tuple[T | None, MegarlError | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = make(), None
            except MegarlError as error:
                outcome = None, error
        value, failure = self.broadcast_from_rank0(outcome)
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]


class LazyFuture[R]:
    """A call that runs when its result, or that of a later call, is requested; satisfies `WorkerFuture`.

    It does not run when it is begun: that would block this process, and the loop that begins the call could not
    measure how long it takes.
    """

    def __init__(self, run: Callable[[], R], begun: deque[LazyFuture[Any]]) -> None:
        self._run, self._begun = run, begun
        begun.append(self)

    def result(self, timeout: float | None = None) -> R:
        """Run all calls up to this one and return its result; only torch.distributed's timeouts apply."""
        while self in self._begun:
            self._begun.popleft().finish()
        return self._value

    def finish(self) -> None:
        """Run the call and store its result."""
        self._value = self._run()


class SpmdGroup[W]:
    """The workers of a role, one on every rank; satisfies `Group`. An exception is raised on its own rank only."""

    def __init__(self, name: str, world: SpmdWorld, grid: RankGrid) -> None:
        assert grid.size == world.size, f"{name}: {grid.size} ranks in a world of {world.size}"
        self.name, self.grid, self._world = name, grid, world
        self._worker: W | None = None
        self._begun: deque[LazyFuture[Any]] = deque()

    def start(self, factory: Callable[..., W], arguments: tuple[Any, ...]) -> LazyFuture[None]:
        """Begin to build the workers."""

        def build() -> None:
            self._worker = self._run("start", lambda: factory(*arguments))
            freeze_objects(collect=True)

        return LazyFuture(build, self._begun)

    def call(
        self, method: Callable[[W, A], R], argument: A, *, dispatch: Dispatch[A, R], timeout: float | None = None
    ) -> R:
        """Run `method` on every rank and return the collected result."""
        return self.begin(method, argument, dispatch=dispatch).result(timeout)

    def begin(self, method: Callable[[W, A], R], argument: A, *, dispatch: Dispatch[A, R]) -> LazyFuture[R]:
        """Enqueue a call of `method`."""
        return LazyFuture(
            lambda: dispatch.collect(self._call_all_ranks(method, argument, dispatch), self.grid), self._begun
        )

    def call_remote(
        self, method: Callable[[W, A], R], argument: A, *, dispatch: Dispatch[A, R], timeout: float | None = None
    ) -> LocalPayload[tuple[R, ...]]:
        """Run `method` on every rank; all results are fetched, since every rank needs them."""
        results = LazyFuture(lambda: self._call_all_ranks(method, argument, dispatch), self._begun).result(timeout)
        return LocalPayload(tuple(results[self.grid.output_rank(dp)] for dp in range(self.grid.dp)))

    def put(self, value: T) -> LocalPayload[T]:
        """Wrap `value`, which is the same on every rank."""
        return LocalPayload(value)

    def _call_all_ranks(self, method: Callable[[W, A], R], argument: A, dispatch: Dispatch[A, R]) -> Sequence[R]:
        worker = self._worker
        assert worker is not None, f"{self.name} has not been started"
        mine = dispatch.distribute(argument, self.grid)[self._world.rank]
        return self._world.gather(self._run(method.__name__, lambda: method(worker, mine)))

    def _run(self, what: str, run: Callable[[], T]) -> T:
        try:
            return run()
        except MegarlError:
            raise
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            raise WorkerError(f"{self.name}.{what} failed on {self.name} rank {self._world.rank}:\n{trace}") from error
