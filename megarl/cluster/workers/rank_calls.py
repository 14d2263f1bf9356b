"""Calls of ranks: sent to their processes directly, or once to a relay on each node, which sends them on.

    controller -> relay of node 0 -> ranks 0 to 7
               -> relay of node 1 -> ranks 8 to 15

What a call costs the controller then depends on the number of nodes, not on that of ranks. Of many nodes, several share
a relay (`ranks_by_relay`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from megarl.cluster.workers.failures import Workers, wait_all
from megarl.cluster.workers.worker_host import pack_call

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
