"""The schedules that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.run.schedule.settings import Late, SchedulePolicy, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A schedule to simulate or run, and how it treats tokens above the cap."""

    policy: SchedulePolicy
    masks: bool = True
    """With `late: mask`, whether tokens above the cap are left out: if not, the cap is only the gate's count."""


def _async(
    lookahead: int, max_staleness: int, late: Late = Late.WAIT, *, in_order: bool = False, adapts: bool = False
) -> SchedulePolicy:
    return SchedulePolicy(
        lookahead=lookahead, max_staleness=max_staleness, late=late, in_order=in_order, adapt_lookahead=adapts
    )


CASES: Mapping[str, Case] = {
    "sync": Case(policy=SchedulePolicy(update=Update.DRAIN, in_order=True)),
    "one_step_off": Case(policy=SchedulePolicy(lookahead=1, max_staleness=1, update=Update.DRAIN, in_order=True)),
    "in order, L 1 eta 1": Case(policy=_async(1, 1, in_order=True)),
    "wait, L 2 eta 4": Case(policy=_async(2, 4)),
    "wait, L 4 eta 4": Case(policy=_async(4, 4)),
    "wait, L 3 eta 8": Case(policy=_async(3, 8)),
    "wait, L 3 eta 8, adapts": Case(policy=_async(3, 8, adapts=True)),
    "mask, L 4 eta 4": Case(policy=_async(4, 4, Late.MASK)),
    "count gate, L 4": Case(policy=_async(4, 4, Late.MASK), masks=False),
    "drop, L 2 eta 4": Case(policy=_async(2, 4, Late.DROP)),
    "drop, L 4 eta 4": Case(policy=_async(4, 4, Late.DROP)),
}
"""The last three are baselines: a cap on the number of open groups alone, and schedules that discard late groups."""
