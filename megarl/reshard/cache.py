"""Plans that were made before: a plan is a pure function of layouts, so the same layouts get the same plan back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from megarl.reshard.layout import WeightLayout
from megarl.reshard.plan import Move, Topology, plan_moves
from megarl.reshard.rounds import Round, cut_rounds

KEPT_PLANS = 8


class MoveList(tuple[Move, ...]):
    """Moves that are known by identity: hashing a plan would cost as much as making it."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def cached_moves(
    sources: Sequence[WeightLayout],
    needs: Mapping[int, WeightLayout],
    topology: Topology,
    groups: Sequence[Sequence[int]] = (),
) -> MoveList:
    """As `plan_moves`."""
    return _moves(
        tuple(sources), tuple((rank, needs[rank]) for rank in sorted(needs)), topology, tuple(map(tuple, groups))
    )


@lru_cache(maxsize=KEPT_PLANS)
def _moves(
    sources: tuple[WeightLayout, ...],
    needs: tuple[tuple[int, WeightLayout], ...],
    topology: Topology,
    groups: tuple[tuple[int, ...], ...],
) -> MoveList:
    return MoveList(plan_moves(sources, dict(needs), topology, groups=groups))


@lru_cache(maxsize=KEPT_PLANS)
def cached_rounds(moves: MoveList, rank: int, bucket_bytes: int) -> list[Round]:
    """As `cut_rounds`."""
    return cut_rounds(moves, rank, bucket_bytes)


def forget_plans() -> None:
    """Plans are made anew from here on."""
    _moves.cache_clear()
    cached_rounds.cache_clear()
