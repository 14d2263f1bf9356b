"""Worker processes, and worker groups: one worker per rank, called by the controller as one.

Each role (actor, critic, ...) is a group with a worker on every rank. Several roles may share the same processes.

    processes = WorkerProcesses("trainer", pool, environment)      process 0    process 1
    actor = WorkerGroup("actor", processes, RankGrid(tp=2))        tp 0         tp 1
    critic = WorkerGroup("critic", processes, RankGrid(dp=2))      dp 0         dp 1

`call` takes the method itself instead of its name, so that a type checker sees the argument and result types:

    stats = group.call(TrainerWorker.train_step, request, dispatch=train_dispatch(cost))

Calls of ranks are sent to their processes directly, or once to a relay on each node, which sends them on:

    controller -> relay of node 0 -> ranks 0 to 7
               -> relay of node 1 -> ranks 8 to 15

What a call costs the controller then depends on the number of relays, not on that of ranks. Of many nodes, several
share a relay, so that the controller calls about as many relays as each of them calls ranks (`ranks_by_relay`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import batched, chain
from math import sqrt
from typing import Any, Protocol, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster.placement.hardware import inline_environment
from megarl.cluster.placement.pool import Slot, SlotPool
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.process.process_start import StartupTiming
from megarl.cluster.process.stack_dump import ProcessInfo
from megarl.cluster.workers.dispatch import Dispatch, Payload, RemoteResults, StoredPayload
from megarl.cluster.workers.failures import Workers, late_names, run_abort_check, wait_all
from megarl.cluster.workers.stragglers import CallLog, CallRecord, CallTime, query_processes
from megarl.cluster.workers.worker_host import WorkerHost, pack_call

_LATE_GROUP = "late"
"""Concurrency group of `CallRelay.late`, which is called while a relay waits."""


@dataclass(frozen=True)  # without slots: pickled in C
class RankCall:
    """A call of a method on some ranks of a role."""

    role: str
    method: str
    ranks: Sequence[int]
    argument_of: Sequence[int]
    """For each of the ranks, the index of its argument."""
    is_timed: bool = False
    """Whether the `CallTime` of each rank is returned as well."""
    prepare: Callable[[Any], Any] | None = None
    """As in `Dispatch`; the arguments are then references."""
    keep: frozenset[int] | None = None
    """Ranks whose results stay in the object store; those of the others are dropped. None: all results are fetched."""

    def name(self, rank: int) -> str:
        """Return the name of a rank in errors."""
        return f"{self.role} rank {rank}"

    @property
    def what(self) -> str:
        """Name of the call in errors."""
        return f"{self.role}.{self.method}"


@dataclass(frozen=True, slots=True)
class SentCall:
    """A call that was sent to ranks."""

    names: Mapping[Any, str]
    """References of all calls to wait for, with the names of their ranks. Calls that prepare arguments come first: an
    argument that cannot be prepared fails the ranks that need it."""
    refs: Sequence[Any]
    """Those that end with the answers of the ranks, in the order of `RankCall.ranks`."""
    kept: Sequence[Any]
    """With `keep`: the reference of each rank's result, None if it is dropped."""

    def answers(self, results: Sequence[Any]) -> list[Any]:
        """Return the answer of each rank, given the results of `names`; with `keep`, pairs of a time and a reference.

        Answers of timed calls are pairs of the result and a `CallTime`.
        """
        own = list(results[len(results) - len(self.refs) :])
        return list(zip(own, self.kept, strict=True)) if self.kept else own


def send_call(call: RankCall, actors: Sequence[Any], arguments: Sequence[Any]) -> SentCall:
    """Call each rank in its process.

    Args:
        actors: the `WorkerHost` of each of `call.ranks`.
        arguments: the distinct ones, values or references, which Ray replaces by the values in the ranks' processes; a
            rank whose argument is None is sent none.
    """
    names: dict[Any, str] = {}
    if call.prepare is not None:
        prepared = list(arguments)
        for index, num_ranks in Counter(call.argument_of).items():
            if num_ranks > 1:
                first = call.argument_of.index(index)
                prepare = actors[first].prepare.options(num_returns=2)
                over, prepared[index] = prepare.remote(call.prepare, arguments[index])
                names[over] = call.name(call.ranks[first])
        arguments = prepared
    packed, refs, kept = pack_call(call.role, call.method, is_timed=call.is_timed), [], []
    for rank, actor, index in zip(call.ranks, actors, call.argument_of, strict=True):
        own = (packed,) if arguments[index] is None else (packed, arguments[index])
        if call.keep is None:
            refs.append(actor.invoke.remote(*own))
        else:
            # The wait fetches the first reference, which is small or the failure, as for any call; the second is the
            # result, which stays with the rank. ray.wait(fetch_local=False) on the results alone does not report
            # failures, and ray.get would transfer the results to this process.
            over, result = actor.invoke_remote.options(num_returns=2).remote(*own)
            refs.append(over)
            kept.append(result if rank in call.keep else None)
    names |= {ref: call.name(rank) for ref, rank in zip(refs, call.ranks, strict=True)}
    return SentCall(names, refs, kept)


class CallRelay:
    """Calls its ranks; a Ray actor on their node that makes one call at a time, in their order."""

    def __init__(self, actors: Mapping[int, Any]) -> None:
        """`actors`: the `WorkerHost` of each rank."""
        self._actors = actors
        self._sent: SentCall | None = None

    @classmethod
    def actor_class(cls) -> Any:
        """Return the class of the Ray actor."""
        return ray.remote(concurrency_groups={_LATE_GROUP: 1})(cls)

    def invoke(self, call: RankCall, arguments: Sequence[Any]) -> list[Any]:
        """Call the ranks and return `SentCall.answers`; raises as `wait_all` does, and does not wait for all then.

        `arguments`: as for `send_call`. A relay cannot unpickle values with a user's classes, whose modules only ranks
        find: it gets references to such values.
        """
        self._sent = sent = send_call(call, [self._actors[rank] for rank in call.ranks], arguments)
        try:
            return sent.answers(wait_all(list(sent.names), what=call.what, names=sent.names))
        finally:
            self._sent = None  # results are kept by those that need them

    def late(self) -> list[str]:
        """Return the names of the ranks that have not answered the call in progress."""
        sent = self._sent
        if sent is None:
            return []
        names = sent.names
        _, waiting = ray.wait(list(names), num_returns=len(names), timeout=0, fetch_local=False)
        return list(dict.fromkeys(names[ref] for ref in waiting))


@dataclass(frozen=True, slots=True)
class Relay:
    """A relay and its ranks."""

    handle: Any
    """Ray actor, a `CallRelay`."""
    ranks: tuple[int, ...]

    def send(self, call: RankCall, arguments: Sequence[Any]) -> Any:
        """Send a call of the relay's ranks; return the reference of a list of their answers."""
        return self.handle.invoke.remote(call, arguments)

    def workers(self, call: RankCall) -> Workers:
        """Return what stands for the names of the ranks while they are waited for."""
        return Workers(
            tuple(map(call.name, self.ranks)), self.handle.late.options(concurrency_group=_LATE_GROUP).remote
        )


W = TypeVar("W")
A = TypeVar("A")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


class WorkerFuture(Protocol[R_co]):
    """The pending result of a call on a worker group."""

    def result(self, timeout: float | None = None) -> R_co:
        """Block until every rank has answered, for at most `timeout` seconds, and return the collected result.

        Raises:
            MegarlError: as the worker raised it.
            WorkerError: a worker died or did not answer in time; names the rank.
        """
        ...


class Group(Protocol[W]):
    """Workers of type W, one per rank, in any process. Calls run in the order in which they were begun."""

    @property
    def grid(self) -> RankGrid:
        """The parallel layout of the ranks."""
        ...

    def start(self, factory: Callable[..., W], arguments: tuple[Any, ...]) -> WorkerFuture[None]:
        """Begin to build the worker `factory(*arguments)` on every rank."""
        ...

    def call(
        self, method: Callable[[W, A], R], argument: A, *, dispatch: Dispatch[A, R], timeout: float | None = None
    ) -> R:
        """Run `method(argument)` on every rank, return the collected result; raises as `WorkerFuture.result` does."""
        ...

    def begin(self, method: Callable[[W, A], R], argument: A, *, dispatch: Dispatch[A, R]) -> WorkerFuture[R]:
        """Begin a call. Returns before the call is over if other processes run it."""
        ...

    def call_remote(
        self, method: Callable[[W, A], R], argument: A, *, dispatch: Dispatch[A, R], timeout: float | None = None
    ) -> Payload[tuple[R, ...]]:
        """Run `method(argument)` on every rank and leave the results in the processes that produced them.

        Returns:
            For each data-parallel replica the result of its output rank (`RankGrid.output_rank`), not collected.
        """
        ...

    def put(self, value: T) -> Payload[T]:
        """Make `value` available to every rank."""
        ...


class Processes(Protocol):
    """Processes that host workers, one process per rank."""

    @property
    def size(self) -> int:
        """Number of worker processes."""
        ...

    @property
    def device(self) -> str:
        """Device type of the ranks: `cpu` or `cuda`."""
        ...

    def group(self, name: str, grid: RankGrid) -> Group[Any]:
        """Return a group for role `name`; role names are unique within the processes."""
        ...

    def run_on_rank0(self, make: Callable[[], T]) -> T:
        """Run `make` in one process and return its result in all processes that called this.

        Raises:
            MegarlError: as `make` raised it, in all calling processes.
        """
        ...


class WorkerProcesses:
    """One Ray actor process per slot of a pool, in slot order; satisfies `Processes`."""

    def __init__(self, name: str, pool: SlotPool, environment: Mapping[str, str]) -> None:
        self.name, self.pool = name, pool
        self.requested_at = time.time()
        """Unix time at which the processes were requested from Ray."""
        actor = ray.remote(WorkerHost)
        self.actors = [
            actor.options(
                name=None,
                num_cpus=slot.cpus,
                num_gpus=slot.gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(pool.group, slot.bundle),
                runtime_env={"env_vars": {**environment, **inline_environment()}},
            ).remote(environment)
            for slot in pool.slots
        ]
        self.relays = [self._start_relay(ranks) for ranks in ranks_by_relay(pool.slots)]
        """Through which ranks are called once they are built; empty: directly."""
        self._rendezvous: tuple[str, int] | None = None
        self.call_log = CallLog()
        """The timing of the calls with equal work of all roles."""

    def _start_relay(self, ranks: Sequence[int]) -> Relay:
        """Start a relay of these ranks, on the node of the first one."""
        here = PlacementGroupSchedulingStrategy(self.pool.group, self.pool.slots[ranks[0]].bundle)
        actor = CallRelay.actor_class().options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
        return Relay(actor.remote({rank: self.actors[rank] for rank in ranks}), tuple(ranks))

    @property
    def size(self) -> int:
        """Number of worker processes."""
        return len(self.actors)

    @property
    def device(self) -> str:
        """Device type of the pool: `cpu` or `cuda`."""
        return self.pool.device

    def group(self, name: str, grid: RankGrid) -> WorkerGroup[Any]:
        """Return a group for role `name` in these processes."""
        return WorkerGroup(name, self, grid)

    def run_on_rank0(self, make: Callable[[], T]) -> T:
        """Return `make()`: only the controller calls this."""
        return make()

    def rank_variables(self) -> list[dict[str, str]]:
        """Return the torch.distributed environment variables of each rank.

        They are the same at every call, since a process joins only one world.
        """
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

    def begin_run(self, function: Callable[[], T]) -> RemoteCall[list[T]]:
        """Begin to call `function` in every process; the result has what it returns in each, in slot order."""
        refs = [actor.run.remote(function) for actor in self.actors]
        names = {ref: f"{self.name} process {rank}" for rank, ref in enumerate(refs)}
        return RemoteCall(refs, list, function.__name__, names)

    def startup_timing(self) -> list[StartupTiming]:
        """Return the startup timing of each rank's process."""
        refs = [actor.startup_timing.remote() for actor in self.actors]
        names = {ref: f"{self.name} process {rank}" for rank, ref in enumerate(refs)}
        return wait_all(refs, what="start", names=names)

    def processes(self) -> dict[str, ProcessInfo]:
        """Return host and pid of each process by its name in errors; call it while the processes still answer."""
        return query_processes(self.named_actors())

    def named_actors(self) -> dict[str, ray.actor.ActorHandle]:
        """Return the Ray actor of each process by its name in errors."""
        return {f"{self.name} rank {rank}": actor for rank, actor in enumerate(self.actors)}

    def pop_call_records(self) -> list[list[CallRecord]]:
        """Return the calls with equal work of each rank that have returned since the last call of this."""
        return self.call_log.take(self.size)

    def stop(self) -> None:
        """Kill every process, and with it the workers of all roles."""
        for actor in (*(relay.handle for relay in self.relays), *self.actors):
            ray.kill(actor)


def by_node(slots: Sequence[Slot]) -> list[list[int]]:
    """Return the ranks of each node."""
    ranks: dict[str, list[int]] = {}
    for rank, slot in enumerate(slots):
        ranks.setdefault(slot.node, []).append(rank)
    return list(ranks.values())


def ranks_by_relay(slots: Sequence[Slot]) -> list[list[int]]:
    """Return the ranks of each relay: those of a node, or of as many neighbouring nodes as to call all ranks soonest.

    The controller calls the relays one after the other, and each relay its ranks: with N ranks, the sum of both is
    smallest for sqrt(N) relays. There are no relays, and ranks are called directly, if all are on one node, or one on
    each.
    """
    nodes = by_node(slots)
    if len(nodes) in (1, len(slots)):
        return []
    nodes_per_relay = max(1, round(len(nodes) / sqrt(len(slots))))
    return [list(chain.from_iterable(part)) for part in batched(nodes, nodes_per_relay)]


@dataclass(frozen=True, slots=True)
class RemoteCall[R]:
    """A call that runs in worker processes; satisfies `WorkerFuture`."""

    refs: Sequence[Any]
    gather: Callable[[Sequence[Any]], R]
    what: str
    names: Mapping[Any, str | Workers]

    def result(self, timeout: float | None = None) -> R:
        """Wait for all ranks, for at most `timeout` seconds, and return the gathered result."""
        return self.gather(wait_all(self.refs, what=self.what, names=self.names, timeout=timeout))

    def result_with(self, other: RemoteCall[Any], timeout: float | None = None) -> R:
        """Return `result`; a failure of the other call, which need not be over, ends the wait as well."""
        names = {**self.names, **other.names}
        results = wait_all(self.refs, what=self.what, names=names, timeout=timeout, watched=other.refs)
        return self.gather(results)

    def raise_failure(self, seconds: float) -> None:
        """Raise the failure of the call if it has failed, or fails within `seconds`; returns if it is over or runs."""
        over, waiting = ray.wait(list(self.refs), num_returns=1, timeout=seconds)
        wait_all(over, what=self.what, names=self.names)
        run_abort_check(partial(late_names, self.names, waiting))

    def settle(self, seconds: float) -> None:
        """Wait until the call is over, successful or not, for at most `seconds`."""
        ray.wait(list(self.refs), num_returns=len(self.refs), timeout=seconds)

    def joined_with(self, other: WorkerFuture[T]) -> RemoteCall[tuple[R, T]]:
        """Combine two calls that wait for each other into one: the root cause of a failure may be on either side."""
        assert isinstance(other, RemoteCall), "only calls in worker processes can be joined"
        count = len(self.refs)
        return RemoteCall(
            [*self.refs, *other.refs],
            lambda results: (self.gather(results[:count]), other.gather(results[count:])),
            f"{self.what} and {other.what}",
            {**self.names, **other.names},
        )


class WorkerGroup[W]:
    """The workers of a role in worker processes; satisfies `Group`."""

    def __init__(self, name: str, processes: WorkerProcesses, grid: RankGrid) -> None:
        """`name`: name of the role, unique within these processes."""
        assert grid.size == len(processes.actors), f"{name}: {grid.size} ranks in {len(processes.actors)} processes"
        self.name, self.grid, self._processes = name, grid, processes

    def start(self, factory: Callable[..., W], arguments: tuple[Any, ...]) -> WorkerFuture[None]:
        """Begin to build the workers, with the torch.distributed variables set."""
        ranks = zip(self._processes.actors, self._processes.rank_variables(), strict=True)
        requested_at = time.time()
        refs = [
            actor.build.remote(self.name, factory, arguments, variables, requested_at) for actor, variables in ranks
        ]
        names = {ref: f"{self.name} rank {rank}" for rank, ref in enumerate(refs)}
        return RemoteCall(refs, lambda _: None, f"{self.name}.start", names)

    def call(
        self, method: Callable[[W, A], R], argument: A, *, dispatch: Dispatch[A, R], timeout: float | None = None
    ) -> R:
        """Run `method` on every rank and return the collected result."""
        return self.begin(method, argument, dispatch=dispatch).result(timeout)

    def begin(self, method: Callable[[W, A], R], argument: A, *, dispatch: Dispatch[A, R]) -> RemoteCall[R]:
        """Send a call of `method` to every rank."""
        call, names, answers = self._send(method, argument, dispatch, keep=None)

        def gather(results: Sequence[Any]) -> R:
            own = answers(results)
            if dispatch.equal_work:
                self._log_call(method, [seconds for _, seconds in own])
                own = [result for result, _ in own]
            return dispatch.collect(own, self.grid)

        return RemoteCall(list(names), gather, call.what, names)

    def call_remote(
        self, method: Callable[[W, A], R], argument: A, *, dispatch: Dispatch[A, R], timeout: float | None = None
    ) -> RemoteResults[R]:
        """Run `method` on every rank and leave the results in Ray's object store."""
        output_ranks = [self.grid.output_rank(dp) for dp in range(self.grid.dp)]
        call, names, answers = self._send(method, argument, dispatch, keep=frozenset(output_ranks))
        own = answers(wait_all(list(names), what=call.what, names=names, timeout=timeout))
        if dispatch.equal_work:
            self._log_call(method, [seconds for seconds, _ in own])
        return RemoteResults(tuple(own[rank][1] for rank in output_ranks))

    def put(self, value: T) -> StoredPayload[T]:
        """Store `value` in Ray's object store."""
        return StoredPayload(ray.put(value))

    def _log_call(self, method: Callable[..., Any], times: Sequence[CallTime]) -> None:
        stages = [self.grid.coordinates(rank).pp for rank in range(self.grid.size)]
        self._processes.call_log.add(self.name, method.__name__, stages, times)

    def _send(
        self, method: Callable[..., Any], argument: A, dispatch: Dispatch[A, R], *, keep: frozenset[int] | None
    ) -> tuple[RankCall, Mapping[Any, str | Workers], Callable[[Sequence[Any]], list[Any]]]:
        """Send a call to all ranks, through their relays if they have any.

        Returns:
            The call of all ranks; the references to wait for, with the names of ranks; and the function that makes the
            answer of each rank, as `SentCall.answers`, of their results.

        Args:
            keep: as `RankCall.keep`.
        """
        of_rank: Sequence[Any] = dispatch.distribute(argument, self.grid)
        distinct, argument_of = _separate(of_rank)
        if dispatch.by_reference:
            distinct = [ray.put(one) for one in distinct]
            of_rank = [distinct[index] for index in argument_of]
        call = RankCall(
            self.name,
            method.__name__,
            ranks=range(self.grid.size),
            argument_of=argument_of,
            is_timed=dispatch.equal_work,
            prepare=dispatch.prepare if dispatch.by_reference else None,
            keep=keep,
        )
        relays = self._processes.relays
        if not relays:
            sent = send_call(call, self._processes.actors, distinct)
            return call, sent.names, sent.answers
        names: dict[Any, str | Workers] = {}
        for relay in relays:
            own, argument_of = _separate([of_rank[rank] for rank in relay.ranks])
            kept = None if keep is None else keep.intersection(relay.ranks)
            sent_on = replace(call, ranks=relay.ranks, argument_of=argument_of, keep=kept)
            names[relay.send(sent_on, own)] = relay.workers(call)

        def answers(results: Sequence[Sequence[Any]]) -> list[Any]:
            by_rank = {
                rank: answer
                for relay, own in zip(relays, results, strict=True)
                for rank, answer in zip(relay.ranks, own, strict=True)
            }
            return [by_rank[rank] for rank in call.ranks]

        return call, names, answers


def _separate(values: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return the distinct objects, and for each value the index of its object."""
    indices: dict[int, int] = {}
    argument_of = tuple(indices.setdefault(id(value), len(indices)) for value in values)
    return list({id(value): value for value in values}.values()), argument_of
