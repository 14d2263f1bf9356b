"""A rank's place in Megatron's grid: tensor-parallel ranks are neighbours, pipeline stages lie farthest apart.

Routed experts see the same ranks as a second grid: within a pipeline stage, `etp * ep * expert-dp` ranks instead of
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
    """Among the ranks that hold the same share of the same experts."""
    pp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """Sizes of the axes, in megatron-core's order `tp-cp-ep-dp-pp`.

    Raises:
        ConfigError: a size is below 1, or the experts' axes do not divide a pipeline stage.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    """Expert parallel size: ranks among which routed experts are dealt."""
    etp: int | None = None
    """Expert tensor parallel size: ranks that split each routed expert. None: tp, which is megatron-core's default for
    `expert_tensor_parallel_size`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size is not None and size < 1:
                raise ConfigError(f"{field.name} needs to be at least 1, got {size}")
        if self._stage % (self.expert_tp * self.ep):
            raise ConfigError(
                f"etp {self.expert_tp} * ep {self.ep} = {self.expert_tp * self.ep} needs to divide the ranks of a "
                f"pipeline stage, got tp {self.tp} * cp {self.cp} * dp {self.dp} = {self._stage}"
                + ("; etp is tp where it is not given" if self.etp is None and self.tp > 1 else "")
            )

    @classmethod
    def of(cls, parallel: ParallelConfig, slots: int) -> RankGrid:
        """The grid of a trainer on `slots` ranks.

        Raises:
            ConfigError: the sizes do not divide them.
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
        """Number of ranks."""
        return self._stage * self.pp

    @property
    def expert_tp(self) -> int:
        """Ranks that split each routed expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Ranks of a pipeline stage that hold the same share of the same experts."""
        return self._stage // (self.expert_tp * self.ep)

    @property
    def _stage(self) -> int:
        return self.tp * self.cp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Where `rank` stands as a holder of routed experts."""
        rest, etp = divmod(rank, self.expert_tp)
        rest, ep = divmod(rest, self.ep)
        pp, dp = divmod(rest, self.expert_dp)
        return ExpertCoordinates(etp=etp, ep=ep, dp=dp, pp=pp)

    def output_rank(self, dp: int) -> int:
        """The rank that answers for data-parallel replica `dp`: first tensor rank of its last pipeline stage."""
        return self.tp * self.cp * (dp + self.dp * (self.pp - 1))
