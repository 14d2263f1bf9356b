"""What distinguishes one schedule from another: six settings of the same state machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.schedule import ScheduleConfig


class Late(StrEnum):
    """What happens to a group that cannot be trained within the staleness cap."""

    WAIT = "wait"
    """It cannot happen: a step waits until its batch leaves every other group enough time."""
    MASK = "mask"
    """Steps never wait for it. Its tokens above the cap leave the loss; its other tokens and its reward count."""
    DROP = "drop"
    """It is discarded once it is above the cap, and another one takes its place."""


class Update(StrEnum):
    """How the engines receive new weights while groups are unfinished."""

    DRAIN = "drain"
    """The push waits until no group is unfinished."""
    RETRACT = "retract"
    """Generation pauses; the new weights recompute the prefixes, and the requests continue."""
    IN_PLACE = "in_place"
    """Generation continues on the KV cache of the old weights."""
    ABORT = "abort"
    """Requests are aborted and continued by new ones that begin with the sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePolicy:
    """The rules of one schedule.

    >>> SchedulePolicy(lookahead=4, max_staleness=2)
    Traceback (most recent call last):
    ValueError: lookahead needs to be at most max_staleness, got 4 > 2
    """

    lookahead: int = 0
    """L, the number of batches that may be open besides the current one. It determines the mean staleness."""
    max_staleness: int = 0
    """The cap eta: a token trained in step t is sampled by version t - 1 - eta or a later one."""
    late: Late = Late.WAIT
    """What happens to a group that cannot meet the cap."""
    update: Update = Update.RETRACT
    """How weights are pushed while groups are unfinished."""
    in_order: bool = False
    """Batches take groups in the order of their ordinals, whichever finish first."""
    adapt_lookahead: bool = False
    """Finished groups beyond a batch, which may be leased, take up the places of as many that are not admitted yet."""

    def __post_init__(self) -> None:
        if self.lookahead < 0:
            raise ValueError(f"lookahead needs to be at least 0, got {self.lookahead}")
        if self.lookahead > self.max_staleness:
            raise ValueError(
                f"lookahead needs to be at most max_staleness, got {self.lookahead} > {self.max_staleness}"
            )

    @classmethod
    def of(cls, config: ScheduleConfig) -> SchedulePolicy:
        """Return the policy of the section `schedule`."""
        settings = config.resolved().model_dump(exclude={"type"})
        late, update = Late(settings.pop("late")), Update(settings.pop("update"))
        return cls(**settings, late=late, update=update, in_order=config.type != "async")

    def deadline(self, version: int) -> int:
        """Return the last step that may train a group admitted at `version`."""
        return version + self.max_staleness + 1

    def oldest_version(self, step: int) -> int:
        """Return the oldest version whose tokens step `step` may train; it may be negative."""
        return step - 1 - self.max_staleness
