"""Megatron's grid of ranks: the tensor-parallel axis is innermost, the pipeline axis outermost.

Routed experts use a second grid over the same ranks: within a pipeline stage, `etp * ep * expert-dp` ranks instead of
`tp * cp * dp`, again with the tensor axis innermost.

    tp 2, dp 2, ep 4, etp 1    rank               0 1 2 3
                               tp index           0 1 0 1
                               dp index           0 0 1 1
                               ep index           0 1 2 3
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megarl.config.trainer import ParallelConfig
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's index on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCoordinates:
    """A rank's index on each axis of the routed experts' grid."""

    etp: int
    ep: int
    dp: int
    """Index among the ranks that hold the same shard of the same experts."""
    pp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """Sizes of the axes, in megatron-core's order `tp-cp-ep-dp-pp`.

    Raises:
        ConfigError: a size is below 1, or `etp * ep` does not divide the ranks of a pipeline stage.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    """Expert-parallel size: number of ranks that the routed experts are distributed over."""
    etp: int | None = None
    """Expert-tensor-parallel size: number of ranks that each routed expert is split over.

    None: `tp`, as megatron-core's `expert_tensor_parallel_size` defaults to.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size is not None and size < 1:
                raise ConfigError(f"{field.name} needs to be at least 1, got {size}")
        if self._stage_size % (self.expert_tp * self.ep):
            raise ConfigError(
                f"etp {self.expert_tp} * ep {self.ep} = {self.expert_tp * self.ep} needs to divide the ranks of a "
                f"pipeline stage, got tp {self.tp} * cp {self.cp} * dp {self.dp} = {self._stage_size}"
                + ("; etp defaults to tp" if self.etp is None and self.tp > 1 else "")
            )

    @classmethod
    def of(cls, parallel: ParallelConfig, slots: int) -> RankGrid:
        """Return the grid of a trainer on `slots` ranks; dp is what the other sizes leave.

        Raises:
            ConfigError: tp * pp * cp does not divide `slots`.
        """
        dp, left = divmod(slots, parallel.model_size)
        if left:
            raise ConfigError(
                f"tp * pp * cp needs to divide the slots, got {slots} % ({parallel.tp} * {parallel.pp} * "
                f"{parallel.cp}) = {left}"
            )
        p = parallel
        return cls(tp=p.tp, cp=p.cp, dp=dp, pp=p.pp, ep=p.ep, etp=p.expert_tp)

    @property
    def size(self) -> int:
        """Number of ranks of the grid."""
        return self._stage_size * self.pp

    @property
    def expert_tp(self) -> int:
        """Number of ranks that each routed expert is split over."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Number of ranks of a pipeline stage that hold the same shard of the same experts."""
        return self._stage_size // (self.expert_tp * self.ep)

    @property
    def _stage_size(self) -> int:
        return self.tp * self.cp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the indices of `rank` on each axis."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Return the indices of `rank` on each axis of the routed experts' grid."""
        rest, etp = divmod(rank, self.expert_tp)
        rest, ep = divmod(rest, self.ep)
        pp, dp = divmod(rest, self.expert_dp)
        return ExpertCoordinates(etp=etp, ep=ep, dp=dp, pp=pp)

    def output_rank(self, dp: int) -> int:
        """Return the output rank of data-parallel replica `dp`: the first tensor rank of its last pipeline stage."""
        return self.tp * self.cp * (dp + self.dp * (self.pp - 1))
