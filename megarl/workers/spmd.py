"""Groups in a world whose ranks all run the same program, this process being one of them: no Ray.

Every rank makes the same calls in the same order. Each runs its own worker's part of a call, and all get its result.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from megarl.errors import MegarlError, WorkerError
from megarl.placement.rank_grid import RankGrid
from megarl.workers.dispatch import Transfer
from megarl.workers.payload import LocalPayload

W = TypeVar("W")
A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")

PATIENCE = timedelta(days=1)
"""For a rank that works while the others have nothing to do; one that ends breaks the wait at once."""


class SpmdWorld:
    """All ranks of torch.distributed's default group, which this process has joined; see `Processes`.

    Made by all of them together.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def group(self, name: str, grid: RankGrid) -> SpmdGroup[Any]:
        """See `Processes`."""
        return SpmdGroup(name, self, grid)

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, on every rank."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def any(self, flag: bool) -> bool:
        """Whether some rank's `flag` is True, on every rank."""
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def from_first(self, value: T) -> T:
        """Rank 0's `value`, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def on_first(self, make: Callable[[], T]) -> T:
        """See `Processes`; it runs on rank 0."""
        outcome: tuple[T | None, MegarlError | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = make(), None
            except MegarlError as error:
                outcome = None, error
        value, failure = self.from_first(outcome)
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]


class Deferred(Generic[R]):
    """A call that runs once its result is wanted, or that of a later one; see `Pending`.

    Not when it is begun: nothing else would go on meanwhile, and the loop that begins it could not tell how long it
    takes.
    """

    def __init__(self, run: Callable[[], R], begun: deque[Deferred[Any]]) -> None:
        self._run, self._begun = run, begun
        begun.append(self)

    def result(self, timeout: float | None = None) -> R:
        """See `Pending`; how long ranks wait for one another in a collective is torch.distributed's to limit."""
        while self in self._begun:
            self._begun.popleft().finish()
        return self._value

    def finish(self) -> None:
        """Run it."""
        self._value = self._run()


class SpmdGroup(Generic[W]):
    """A role with a worker on every rank; see `Group`. What a method raises, its own rank alone gets."""

    def __init__(self, name: str, world: SpmdWorld, grid: RankGrid) -> None:
        assert grid.size == world.size, f"{name}: {grid.size} ranks in a world of {world.size}"
        self.name, self.grid, self._world = name, grid, world
        self._worker: W | None = None
        self._begun: deque[Deferred[Any]] = deque()

    def start(self, factory: Callable[..., W], arguments: tuple[Any, ...]) -> Deferred[None]:
        """See `Group`."""

        def build() -> None:
            self._worker = self._run("start", lambda: factory(*arguments))

        return Deferred(build, self._begun)

    def call(self, method: Callable[[W, A], R], argument: A, *, via: Transfer[A, R], timeout: float | None = None) -> R:
        """See `Group`."""
        return self.begin(method, argument, via=via).result(timeout)

    def begin(self, method: Callable[[W, A], R], argument: A, *, via: Transfer[A, R]) -> Deferred[R]:
        """See `Group`."""
        return Deferred(lambda: via.collect(self._everywhere(method, argument, via), self.grid), self._begun)

    def keep(
        self, method: Callable[[W, A], R], argument: A, *, via: Transfer[A, R], timeout: float | None = None
    ) -> LocalPayload[tuple[R, ...]]:
        """See `Group`; every rank needs what any has made, so all of it is here."""
        results = Deferred(lambda: self._everywhere(method, argument, via), self._begun).result(timeout)
        return LocalPayload(tuple(results[self.grid.output_rank(dp)] for dp in range(self.grid.dp)))

    def put(self, value: T) -> LocalPayload[T]:
        """See `Group`; every rank has made the same value."""
        return LocalPayload(value)

    def _everywhere(self, method: Callable[[W, A], R], argument: A, via: Transfer[A, R]) -> Sequence[R]:
        worker = self._worker
        assert worker is not None, f"{self.name} has not been started"
        mine = via.dispatch(argument, self.grid)[self._world.rank]
        return self._world.gather(self._run(method.__name__, lambda: method(worker, mine)))

    def _run(self, what: str, run: Callable[[], T]) -> T:
        try:
            return run()
        except MegarlError:
            raise
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            raise WorkerError(f"{self.name}.{what} failed on {self.name} rank {self._world.rank}:\n{trace}") from error
