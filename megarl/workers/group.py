"""Worker processes, and the groups of workers in them that the controller calls as one.

A role (actor, critic, ...) is a group: a worker on every rank. Several roles may live in the same processes.

    processes = WorkerProcesses("trainer", pool, environment)      process 0    process 1
    actor = WorkerGroup("actor", processes, RankGrid(tp=2))        tp 0         tp 1
    critic = WorkerGroup("critic", processes, RankGrid(dp=2))      dp 0         dp 1

`call` takes the method itself, not its name, so that a type checker sees argument and result:

    stats = group.call(TrainerWorker.train_step, work, via=split_by_dp)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.placement.pool import SlotPool
from megarl.placement.rank_grid import RankGrid
from megarl.process.stack_dump import ProcessPlace
from megarl.process.startup_trace import ProcessStart
from megarl.workers.dispatch import Transfer
from megarl.workers.failures import wait_all
from megarl.workers.payload import Kept, Payload, StoredPayload
from megarl.workers.stack_collector import ask_places
from megarl.workers.stragglers import CallRecord
from megarl.workers.worker_host import Shell

W = TypeVar("W")
A = TypeVar("A")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


class Pending(Protocol[R_co]):
    """A call under way."""

    def result(self, timeout: float | None = None) -> R_co:
        """Block until every rank has answered, `timeout` seconds at most.

        Raises:
            MegarlError: as the worker raised it; WorkerError when a worker died or was late; both name the rank.
        """
        ...


class Group(Protocol[W]):
    """Workers of type W, one a rank, wherever they are. Calls run in the order in which they were begun."""

    @property
    def grid(self) -> RankGrid:
        """Which rank does what."""
        ...

    def start(self, factory: Callable[..., W], arguments: tuple[Any, ...]) -> Pending[None]:
        """Build the worker on every rank."""
        ...

    def call(self, method: Callable[[W, A], R], argument: A, *, via: Transfer[A, R], timeout: float | None = None) -> R:
        """The collected result of `method(argument)` on every rank; raises as `Pending.result` does."""
        ...

    def begin(self, method: Callable[[W, A], R], argument: A, *, via: Transfer[A, R]) -> Pending[R]:
        """Start a call and return, before it is over where other processes run it."""
        ...

    def keep(
        self, method: Callable[[W, A], R], argument: A, *, via: Transfer[A, R], timeout: float | None = None
    ) -> Payload[tuple[R, ...]]:
        """As `call`, with the results left where they are.

        Returns:
            By data-parallel replica the result of its answering rank (`RankGrid.output_rank`), not collected.
        """
        ...

    def put(self, value: T) -> Payload[T]:
        """Make `value` available to every rank."""
        ...


class Processes(Protocol):
    """Processes that host workers, one a rank."""

    @property
    def size(self) -> int:
        """How many."""
        ...

    @property
    def device(self) -> str:
        """What ranks compute on: `cpu` or `cuda`."""
        ...

    def group(self, name: str, grid: RankGrid) -> Group[Any]:
        """The role `name` in them; no other has this name."""
        ...

    def on_first(self, make: Callable[[], T]) -> T:
        """What `make` returns in one of the processes that call this: where they are many, all get it.

        Raises:
            MegarlError: in all of them, as `make` raised it.
        """
        ...


class WorkerProcesses:
    """One process per slot of a pool, ranked as the slots are; see `Processes`."""

    def __init__(self, name: str, pool: SlotPool, environment: Mapping[str, str]) -> None:
        self.name, self.pool = name, pool
        self.asked = time.time()
        """When Ray was asked for them."""
        actor = ray.remote(Shell)
        self.actors = [
            actor.options(
                name=None,
                num_cpus=slot.cpus,
                num_gpus=slot.gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(pool.group, slot.bundle),
                runtime_env={"env_vars": dict(environment)},
            ).remote(environment)
            for slot in pool.slots
        ]
        self._rendezvous: tuple[str, int] | None = None

    @property
    def size(self) -> int:
        """See `Processes`."""
        return len(self.actors)

    @property
    def device(self) -> str:
        """See `Processes`."""
        return self.pool.device

    def group(self, name: str, grid: RankGrid) -> WorkerGroup[Any]:
        """See `Processes`."""
        return WorkerGroup(name, self, grid)

    def on_first(self, make: Callable[[], T]) -> T:
        """See `Processes`; only the controller calls."""
        return make()

    def rank_variables(self) -> list[dict[str, str]]:
        """By rank, torch.distributed's variables: the same at every call, since a process joins one world only."""
        if self._rendezvous is None:
            ref = self.actors[0].rendezvous.remote()
            (self._rendezvous,) = wait_all([ref], what="start", names={ref: f"{self.name} process 0"})
        address, port = self._rendezvous
        return [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self.actors)),
                "LOCAL_RANK": "0",  # Ray shows each process its own devices only
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
            for rank in range(len(self.actors))
        ]

    def came_up(self) -> list[ProcessStart]:
        """By rank, how its process did."""
        refs = [actor.came_up.remote() for actor in self.actors]
        names = {ref: f"{self.name} process {rank}" for rank, ref in enumerate(refs)}
        return wait_all(refs, what="start", names=names)

    def places(self) -> dict[str, ProcessPlace]:
        """Where each process is, by the name it has in errors; to be asked while they answer."""
        return ask_places({f"{self.name} rank {rank}": actor for rank, actor in enumerate(self.actors)})

    def take_calls(self) -> list[list[CallRecord]]:
        """By rank, its calls since the last time; it answers once it has no call under way."""
        refs = [actor.take_calls.remote() for actor in self.actors]
        names = {ref: f"{self.name} rank {rank}" for rank, ref in enumerate(refs)}
        return wait_all(refs, what="take_calls", names=names)

    def stop(self) -> None:
        """End every process, and with it the workers of every role."""
        for actor in self.actors:
            ray.kill(actor)


@dataclass(frozen=True, slots=True)
class RemoteCall(Generic[R]):
    """A call under way in worker processes; see `Pending`."""

    refs: Sequence[Any]
    gather: Callable[[Sequence[Any]], R]
    what: str
    names: Mapping[Any, str]

    def result(self, timeout: float | None = None) -> R:
        """See `Pending`."""
        return self.gather(wait_all(self.refs, what=self.what, names=self.names, timeout=timeout))

    def beside(self, other: Pending[T]) -> RemoteCall[tuple[R, T]]:
        """Both as one call, where each side waits for the other: of a failure the cause may be on either."""
        assert isinstance(other, RemoteCall), "a call in this process has nothing beside it"
        count = len(self.refs)
        return RemoteCall(
            [*self.refs, *other.refs],
            lambda results: (self.gather(results[:count]), other.gather(results[count:])),
            f"{self.what} beside {other.what}",
            {**self.names, **other.names},
        )


class WorkerGroup(Generic[W]):
    """A role in worker processes; see `Group`."""

    def __init__(self, name: str, processes: WorkerProcesses, grid: RankGrid) -> None:
        """`name`: of the role; no other in these processes has it."""
        assert grid.size == len(processes.actors), f"{name}: {grid.size} ranks in {len(processes.actors)} processes"
        self.name, self.grid, self._processes = name, grid, processes

    def start(self, factory: Callable[..., W], arguments: tuple[Any, ...]) -> Pending[None]:
        """See `Group`; torch.distributed's variables are set before."""
        ranks = zip(self._processes.actors, self._processes.rank_variables(), strict=True)
        asked = time.time()
        refs = [actor.build.remote(self.name, factory, arguments, variables, asked) for actor, variables in ranks]
        return RemoteCall(refs, lambda _: None, f"{self.name}.start", self._names(refs))

    def call(self, method: Callable[[W, A], R], argument: A, *, via: Transfer[A, R], timeout: float | None = None) -> R:
        """See `Group`."""
        return self.begin(method, argument, via=via).result(timeout)

    def begin(self, method: Callable[[W, A], R], argument: A, *, via: Transfer[A, R]) -> RemoteCall[R]:
        """See `Group`."""
        ranks = zip(self._processes.actors, via.dispatch(argument, self.grid), strict=True)
        refs = [actor.invoke.remote(self.name, method.__name__, one) for actor, one in ranks]
        return RemoteCall(refs, lambda results: via.collect(results, self.grid), self._what(method), self._names(refs))

    def keep(
        self, method: Callable[[W, A], R], argument: A, *, via: Transfer[A, R], timeout: float | None = None
    ) -> Kept[R]:
        """See `Group`."""
        # Two references a rank, so that the wait is the same as for any call: it gets the first, which is None or the
        # failure, and the second stays with the rank. ray.wait(fetch_local=False) on the results alone would not tell
        # a failure, and getting one to see would bring it here.
        ranks = zip(self._processes.actors, via.dispatch(argument, self.grid), strict=True)
        both = [actor.keep.options(num_returns=2).remote(self.name, method.__name__, one) for actor, one in ranks]
        over = [done for done, _ in both]
        wait_all(over, what=self._what(method), names=self._names(over), timeout=timeout)
        return Kept(tuple(both[self.grid.output_rank(dp)][1] for dp in range(self.grid.dp)))

    def put(self, value: T) -> StoredPayload[T]:
        """See `Group`."""
        return StoredPayload(ray.put(value))

    def _what(self, method: Callable[..., Any]) -> str:
        return f"{self.name}.{method.__name__}"

    def _names(self, refs: Sequence[Any]) -> dict[Any, str]:
        return {ref: f"{self.name} rank {rank}" for rank, ref in enumerate(refs)}
