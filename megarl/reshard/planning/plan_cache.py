"""Plans that were made before: a plan is a pure function of layouts, so the same layouts get the same plan back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megarl.reshard.layout.box_index import SyncIndex
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan import plan_rank
from megarl.reshard.planning.rounds import Round, build_rounds
from megarl.reshard.transfer.executor import Memory

KEPT_PLANS = 8
PADDING = 1024
"""Bytes of a bucket that alignment may take."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One rank's rounds, and the memory that they take."""

    rounds: tuple[Round, ...]
    memory: Memory


def cached_index(
    sources: Sequence[WeightLayout],
    needs: Mapping[int, WeightLayout],
    topology: Topology,
    bucket_bytes: int,
    *,
    groups: Sequence[Sequence[int]] = (),
    relay: bool = True,
) -> SyncIndex:
    """As `SyncIndex`, for rounds that fit into two buckets of `bucket_bytes` with everything that they need."""
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
    """The most that a rank receives in a round: of what it allocates, half is to receive into, half to send from."""
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
) -> Planned:
    """Rank `rank`'s rounds; they take at most two buckets of `bucket_bytes`, but for single rows that are larger."""
    index = cached_index(sources, needs, topology, bucket_bytes, groups=groups, relay=relay)
    return _plan(index, rank, bucket_bytes)


@lru_cache(maxsize=KEPT_PLANS)
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


@lru_cache(maxsize=KEPT_PLANS)
def _plan(index: SyncIndex, rank: int, bucket_bytes: int) -> Planned:
    rounds = tuple(build_rounds(index, plan_rank(index, rank)))
    return Planned(rounds, Memory.of(rounds, bucket_bytes))


def forget_plans() -> None:
    """Plans are made anew from here on."""
    _index.cache_clear()
    _plan.cache_clear()
