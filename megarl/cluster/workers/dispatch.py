"""What a call on workers carries, and how it is distributed over them: handles on values, batches of calls, `Dispatch`.

A payload is a handle on a value that stays where it was produced until it is fetched. The controller forwards payloads
without fetching them: the values go from worker to worker through Ray's object store, where NumPy arrays are read
without a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import MegarlError

T_co = TypeVar("T_co", covariant=True)


class Payload(Protocol[T_co]):
    """A handle on a value of type T."""

    @property
    def refs(self) -> tuple[Any, ...]:
        """References of the stored values that make up this one; empty if it is in this process."""
        ...

    def load(self, values: Sequence[Any]) -> T_co:
        """Return the value, given those of `refs`."""
        ...

    def fetch(self) -> T_co:
        """Return the value itself."""
        ...


@dataclass(frozen=True)  # without slots: pickled in C
class StoredPayload[T]:
    """A value in Ray's object store."""

    ref: Any
    """The ray.ObjectRef of a T."""

    @property
    def refs(self) -> tuple[Any, ...]:
        """The reference, as the only one."""
        return (self.ref,)

    def load(self, values: Sequence[T]) -> T:
        """Return the only value."""
        return values[0]

    def fetch(self) -> T:
        """Return the value; NumPy arrays in it are read-only."""
        return fetch_all([self])[0]


@dataclass(frozen=True)  # without slots: pickled in C
class StoredItem[T]:
    """An item of a sequence in Ray's object store: small values that were produced together share an object."""

    ref: Any
    """The ray.ObjectRef of a sequence of T."""
    index: int

    @property
    def refs(self) -> tuple[Any, ...]:
        """The reference to the sequence."""
        return (self.ref,)

    def load(self, values: Sequence[Sequence[T]]) -> T:
        """Return the item of the only value."""
        return values[0][self.index]

    def fetch(self) -> T:
        """Return the item; NumPy arrays in it are read-only."""
        return fetch_all([self])[0]


@dataclass(frozen=True, slots=True)
class RemoteResults[T]:
    """The results of a call on several ranks, each stored on the node of the rank that produced it."""

    refs: tuple[Any, ...]
    """One ray.ObjectRef of a T per data-parallel replica."""

    def load(self, values: Sequence[T]) -> tuple[T, ...]:
        """Return the results by data-parallel replica."""
        return tuple(values)

    def fetch(self) -> tuple[T, ...]:
        """Return the results by data-parallel replica; NumPy arrays in them are read-only."""
        return fetch_all([self])[0]


@dataclass(frozen=True, slots=True)
class LocalPayload[T]:
    """A value in this process, for stages that run without Ray and for tests."""

    value: T

    @property
    def refs(self) -> tuple[Any, ...]:
        """Nothing: the value is here."""
        return ()

    def load(self, values: Sequence[Any]) -> T:
        """Return the value itself."""
        return self.value

    def fetch(self) -> T:
        """Return the value itself."""
        return self.value


def fetch_all[T](payloads: Iterable[Payload[T]]) -> list[T]:
    """Return the values of the payloads, all fetched in one call, and an object of several payloads once.

    NumPy arrays in them are read-only.
    """
    payloads = list(payloads)
    refs = list(dict.fromkeys(ref for payload in payloads for ref in payload.refs))
    values = dict(zip(refs, _get(refs), strict=True)) if refs else {}
    return [payload.load([values[ref] for ref in payload.refs]) for payload in payloads]


def distinct_refs[T](items: Sequence[StoredItem[T]]) -> tuple[list[Any], tuple[tuple[int, int], ...]]:
    """Return the references to the objects of the items, and the position of each item: (reference, index)."""
    positions: dict[Any, int] = {}
    places = [(positions.setdefault(item.ref, len(positions)), item.index) for item in items]
    return list(positions), tuple(places)  # a tuple: Ray pickles each item of a list by itself


MAX_ARGUMENTS = 64
"""Largest number of stored values that are arguments of one call. Ray fetches those below 100 kB to the caller, and
sends them by value, all of them in one message, of at most 512 MiB."""


@dataclass(frozen=True, slots=True)
class UnfetchedArguments:
    """References to the arguments of a call, whose receiver fetches the values."""

    refs: tuple[Any, ...]


def as_arguments(refs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with which a call gets the values of stored objects, however many, by `fetch_arguments`."""
    return tuple(refs) if len(refs) <= MAX_ARGUMENTS else (UnfetchedArguments(tuple(refs)),)


def fetch_arguments(arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the values of stored objects, given what has become of `as_arguments`; blocks until they are here."""
    match arguments:
        case [UnfetchedArguments(refs=refs)]:
            return _get(list(refs))
        case _:
            return arguments  # Ray has replaced the references


def _get(refs: list[Any]) -> list[Any]:
    import ray  # a trainer rank whose values are all local needs no Ray

    values: list[Any] = ray.get(refs)
    return values


async def call_for_all[T, R](
    call: Callable[[Sequence[T]], Awaitable[Sequence[R]]], batch: Sequence[tuple[T, asyncio.Future[R]]]
) -> None:
    """Call once for all items, and set the future of each to its result; an error of the call is set in all of them.

    Futures that are done, such as those of callers that were canceled, stay as they are.

    Args:
        call: returns one result per item, in order.
    """
    try:
        values = await call([item for item, _ in batch])
        assert len(values) == len(batch), f"{len(values)} results for {len(batch)} items"
    except Exception as error:  # noqa: BLE001 -- raised again in each of the callers
        for _, result in batch:
            if not result.done():
                result.set_exception(error)
        return
    for (_, result), value in zip(batch, values, strict=True):
        if not result.done():
            result.set_result(value)


LINGER_SECONDS = 0.03
"""Results that finish within this time of the first one are collected with it: each call costs a millisecond."""

MAX_CANCELED = 1000
"""Number of batches whose canceled calls are remembered, although the batch is not known."""


class CallBatches[A, R]:
    """The batches in progress in a process, each of which has one client that collects it."""

    def __init__(self, call: Callable[[A], Awaitable[R]]) -> None:
        """`call`: returns the result of one argument."""
        self._call = call
        self._batches: dict[str, dict[asyncio.Future[R], int]] = {}
        """By id of the batch, index of each call whose result has not been collected."""
        self._canceled: dict[str, set[int]] = {}
        """By id of a batch that has not begun or is over, indices of canceled calls; the latest `MAX_CANCELED` ids."""

    @property
    def num_unfinished(self) -> int:
        """Number of calls that are running."""
        return sum(not future.done() for waiting in list(self._batches.values()) for future in list(waiting))

    def num_ready(self, batch_id: str) -> int:
        """Return the number of calls of a batch that have ended and were not collected."""
        return sum(future.done() for future in self._batches.get(batch_id, ()))

    async def begin(
        self, batch_id: str, arguments: Sequence[A], limit: int | None = None
    ) -> list[tuple[int, R | MegarlError]]:
        """Begin the calls of a batch, and return the first results as `collect` does.

        Calls that were canceled before are not begun: a large message may be overtaken by a small one.
        """
        canceled = self._canceled.pop(batch_id, set())
        wanted = [(i, one) for i, one in enumerate(arguments) if i not in canceled]
        self._batches[batch_id] = {asyncio.ensure_future(self._call(one)): i for i, one in wanted}
        return await self.collect(batch_id, limit)

    async def collect(self, batch_id: str, limit: int | None = None) -> list[tuple[int, R | MegarlError]]:
        """Wait for a result of the batch; return those that have finished, each with the index of its call.

        A failed call gives its error instead of a result. Call it until all calls of the batch were returned. Returns
        nothing if the calls that were left have been canceled.

        Args:
            limit: largest number of results to return; others are returned by the next call.

        Raises:
            Exception: a call raised an error that is not of megarl; the batch is over.
        """
        waiting = self._batches.get(batch_id, {})
        while waiting and not any(future.done() for future in waiting):
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LINGER_SECONDS
        while (seconds := deadline - loop.time()) > 0:
            running = [future for future in waiting if not future.done()]
            if not running or len(waiting) - len(running) >= (limit or len(waiting)):
                break
            await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finished = [(index, future) for future, index in waiting.items() if future.done()][:limit]
        try:
            collected = [(index, self._outcome(future)) for index, future in finished]
        except BaseException:
            self.cancel(batch_id, list(waiting.values()))
            raise
        for _, future in finished:
            del waiting[future]
        if not waiting:
            self._batches.pop(batch_id, None)
        return collected

    def cancel(self, batch_id: str, indices: Iterable[int]) -> None:
        """Cancel these calls of a batch, whose results are not returned; calls that were returned are ignored."""
        if batch_id not in self._batches:
            self._canceled.setdefault(batch_id, set()).update(indices)
            if len(self._canceled) > MAX_CANCELED:
                del self._canceled[next(iter(self._canceled))]
            return
        waiting, canceled = self._batches[batch_id], set(indices)
        for future in [future for future, index in waiting.items() if index in canceled]:
            future.cancel()
            del waiting[future]
        if not waiting:
            self._batches.pop(batch_id, None)

    async def close(self) -> None:
        """Cancel all calls, and return once they have ended."""
        running = [future for waiting in self._batches.values() for future in waiting]
        for batch_id in list(self._batches):
            self.cancel(batch_id, list(self._batches[batch_id].values()))
        await asyncio.gather(*running, return_exceptions=True)

    def _outcome(self, future: asyncio.Future[R]) -> R | MegarlError:
        try:
            return future.result()
        except MegarlError as error:
            return error


@dataclass(frozen=True, slots=True)
class Dispatch[A, R]:
    """A pair of functions that make a method `(A) -> R` of every rank look like one `(A) -> R` to the caller."""

    distribute: Callable[[A, RankGrid], Sequence[A]]
    """Returns one argument per rank, in rank order."""

    collect: Callable[[Sequence[R], RankGrid], R]
    """Combines the results of all ranks, in rank order, into one."""

    equal_work: bool = False
    """Whether all ranks of a pipeline stage do the same amount of work in the call. Stragglers are sought in such calls
    only: in others, such as a weight push, one rank may do most of the work by design."""

    by_reference: bool = False
    """Whether the arguments are large: each is stored once for all ranks that `distribute` gives the same object, and
    these ranks are sent a reference."""

    prepare: Callable[[A], A] | None = None
    """With `by_reference`: a module-level function that the first of several ranks of a relay with the same argument
    applies to it; what it returns is stored and sent to all of them. It may fetch what the argument refers to, and a
    rank that gets the argument itself has to do as much. None: nothing."""


def to_all[A](argument: A, grid: RankGrid) -> list[A]:
    """Return the same argument for every rank."""
    return [argument] * grid.size


def from_output_rank[R](results: Sequence[R], grid: RankGrid) -> R:
    """Return the result of the output rank of data-parallel replica 0; workers have reduced it over replicas."""
    return results[grid.output_rank(0)]


def from_rank0[R](results: Sequence[R], grid: RankGrid) -> R:
    """Return the result of rank 0."""
    return results[0]


BROADCAST: Dispatch[Any, Any] = Dispatch(to_all, from_rank0)
"""Sends the same argument to every rank and returns the result of rank 0."""
