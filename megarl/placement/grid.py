"""A rank's place in Megatron's grid: tensor-parallel ranks are neighbours, pipeline stages lie farthest apart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's index on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """Sizes of the axes, in megatron-core's order `tp-cp-ep-dp-pp`."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def output_rank(self, dp: int) -> int:
        """The rank that answers for data-parallel replica `dp`: first tensor rank of its last pipeline stage."""
        return self.tp * self.cp * (dp + self.dp * (self.pp - 1))
