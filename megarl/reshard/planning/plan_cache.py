"""Plan cache: a plan is a pure function of the layouts, so the same layouts return the cached plan.

The key of a plan is a digest of its inputs. Neither the layouts nor the index tables are kept for it: those of a large
model take more memory than all plans together.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.reshard.layout.box_index import SyncIndex
from megarl.reshard.layout.layout import WeightLayout, once_each
from megarl.reshard.layout.model_tensors import digest_of
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning import rounds as round_planning
from megarl.reshard.planning.plan import plan_rank
from megarl.reshard.planning.rounds import Round, build_rounds
from megarl.reshard.transfer.executor import BufferSizes

PLAN_CACHE_SIZE = 8


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The rounds of one rank, and the sizes of the buffers they need."""

    rounds: tuple[Round, ...]
    buffer_sizes: BufferSizes


_plans: OrderedDict[bytes, RoundPlan] = OrderedDict()
_indexes: OrderedDict[bytes, SyncIndex] = OrderedDict()


def cached_index(
    sources: Sequence[WeightLayout],
    needs: Mapping[int, WeightLayout],
    topology: Topology,
    bucket_bytes: int,
    *,
    groups: Sequence[Sequence[int]] = (),
) -> SyncIndex:
    """Return the cached `SyncIndex` whose rounds, with all their buffers, fit in two buckets of `bucket_bytes`."""

    def make() -> SyncIndex:
        large_bytes = round_planning.LARGE_MESSAGE_BYTES
        return SyncIndex(sources, needs, topology, groups=groups, bucket_bytes=bucket_bytes, large_bytes=large_bytes)

    # with the names of local tensors: an index looks those of its ranks up
    held = once_each(lambda layout: layout.digest, sources)
    return _cached(_indexes, _key(held, needs, topology, bucket_bytes, groups), make)


def cached_plan(
    sources: Sequence[WeightLayout],
    needs: Mapping[int, WeightLayout],
    topology: Topology,
    rank: int,
    bucket_bytes: int,
    *,
    groups: Sequence[Sequence[int]] = (),
) -> RoundPlan:
    """Return the rounds of `rank`; they need at most two buckets of `bucket_bytes`, except for larger single rows.

    The names of local tensors are needed in the layouts of `rank` only.

    Raises:
        WeightSyncError: no rank holds an element that `rank` needs, or ranks have a tensor in different dtypes.
    """

    def make() -> RoundPlan:
        index = cached_index(sources, needs, topology, bucket_bytes, groups=groups)
        rounds = tuple(build_rounds(index, plan_rank(index, rank)))
        return RoundPlan(rounds, BufferSizes.for_rounds(rounds))

    held = [*once_each(lambda layout: layout.box_digest, sources), sources[rank].digest, b"%d" % rank]
    return _cached(_plans, _key(held, needs, topology, bucket_bytes, groups), make)


def _key(
    held: Sequence[bytes],
    needs: Mapping[int, WeightLayout],
    topology: Topology,
    bucket_bytes: int,
    groups: Sequence[Sequence[int]],
) -> bytes:
    """Return a digest of the inputs of a plan; `held`: digests of the trainer's layouts."""
    ranks = sorted(needs)
    limits = bucket_bytes, round_planning.LARGE_MESSAGE_BYTES
    others = ranks, topology.nodes, limits, [list(group) for group in groups]
    needed = once_each(lambda layout: layout.digest, [needs[rank] for rank in ranks])
    return digest_of([b"".join(held), repr(others).encode(), b"".join(needed)])


def _cached[T](cache: OrderedDict[bytes, T], key: bytes, make: Callable[[], T]) -> T:
    """Return the value of `key`, made if it is missing; the cache keeps the last `PLAN_CACHE_SIZE` used."""
    if key not in cache:
        cache[key] = make()
        while len(cache) > PLAN_CACHE_SIZE:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]


def release_indexes() -> None:
    """Return the memory of index tables and decoded layouts, which planning needs, to the system; plans are kept."""
    while _indexes:
        _indexes.popitem()[1].release_layouts()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, which keeps hundreds of MB otherwise
    if malloc_trim is not None:
        malloc_trim(0)


def clear_plan_cache() -> None:
    """Clear the cached plans and index tables."""
    _plans.clear()
    _indexes.clear()
