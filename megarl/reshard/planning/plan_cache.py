"""Plan cache: a plan is a pure function of the layouts, so the same layouts return the cached plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megarl.reshard.layout.box_index import SyncIndex
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan import plan_rank
from megarl.reshard.planning.rounds import Round, build_rounds
from megarl.reshard.transfer.executor import BufferSizes

PLAN_CACHE_SIZE = 8
PADDING = 1024
"""Bytes of a bucket reserved for alignment."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The rounds of one rank, and the sizes of the buffers they need."""

    rounds: tuple[Round, ...]
    buffer_sizes: BufferSizes


def cached_index(
    sources: Sequence[WeightLayout],
    needs: Mapping[int, WeightLayout],
    topology: Topology,
    bucket_bytes: int,
    *,
    groups: Sequence[Sequence[int]] = (),
    relay: bool = True,
) -> SyncIndex:
    """Return the cached `SyncIndex` whose rounds, with all their buffers, fit in two buckets of `bucket_bytes`."""
    ranks = tuple(sorted(needs))
    return _index(
        tuple(sources),
        ranks,
        tuple(needs[rank] for rank in ranks),
        topology,
        tuple(map(tuple, groups)),
        relay,
        round_bytes(bucket_bytes),
    )


def round_bytes(bucket_bytes: int) -> int:
    """Return the most bytes that a rank receives in a round: half of the memory is for receiving, half for sending."""
    return max(bucket_bytes // 2 - PADDING, bucket_bytes // 4)


def cached_plan(
    sources: Sequence[WeightLayout],
    needs: Mapping[int, WeightLayout],
    topology: Topology,
    rank: int,
    bucket_bytes: int,
    *,
    groups: Sequence[Sequence[int]] = (),
    relay: bool = True,
) -> RoundPlan:
    """Return the rounds of `rank`; they need at most two buckets of `bucket_bytes`, except for larger single rows."""
    index = cached_index(sources, needs, topology, bucket_bytes, groups=groups, relay=relay)
    return _plan(index, rank, bucket_bytes)


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def _index(
    sources: tuple[WeightLayout, ...],
    ranks: tuple[int, ...],
    needs: tuple[WeightLayout, ...],
    topology: Topology,
    groups: tuple[tuple[int, ...], ...],
    relay: bool,
    round_bytes: int,
) -> SyncIndex:
    layouts = dict(zip(ranks, needs, strict=True))
    return SyncIndex(sources, layouts, topology, groups=groups, relay=relay, bucket_bytes=round_bytes)


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def _plan(index: SyncIndex, rank: int, bucket_bytes: int) -> RoundPlan:
    rounds = tuple(build_rounds(index, plan_rank(index, rank)))
    return RoundPlan(rounds, BufferSizes.for_rounds(rounds, bucket_bytes))


def clear_plan_cache() -> None:
    """Clear the cached plans and index tables."""
    _index.cache_clear()
    _plan.cache_clear()
