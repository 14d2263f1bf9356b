"""The section `schedule`: defaults by type, and combinations that are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megarl.config.rollout import SglangConfig
from megarl.config.schedule import ScheduleConfig
from megarl.config.section import Section
from megarl.schedule.policy import Late, SchedulePolicy, Update


class Holder(Section):
    """A configuration with the section."""

    schedule: ScheduleConfig = ScheduleConfig()
    """The section."""


def policy(**settings: object) -> SchedulePolicy:
    return SchedulePolicy.of(Holder.model_validate({"schedule": settings}).schedule)


def test_defaults_by_type() -> None:
    assert policy() == policy(type="sync") == SchedulePolicy(update=Update.DRAIN, in_order=True)
    one_step_off = SchedulePolicy(lookahead=1, max_staleness=1, update=Update.DRAIN, in_order=True)
    assert policy(type="one_step_off") == policy(type="one_step_off", lookahead=1) == one_step_off
    assert policy(type="async") == SchedulePolicy(lookahead=3, max_staleness=8, update=Update.RETRACT)
    assert policy(type="async", adapt_lookahead=True).adapt_lookahead


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lookahead": 0, "max_staleness": 0}, (0, 0)),
        ({"max_staleness": 2}, (2, 2)),
        ({"lookahead": 10}, (10, 10)),
        ({"lookahead": 2}, (2, 8)),
    ],
)
def test_async_settings(given: dict[str, int], expected: tuple[int, int]) -> None:
    got = policy(type="async", late="mask", update="abort", **given)
    assert (got.lookahead, got.max_staleness) == expected
    assert (got.late, got.update, got.in_order) == (Late.MASK, Update.ABORT, False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "async", "lookahead": 4, "max_staleness": 2}, "lookahead .* at most max_staleness, got 4 > 2"),
        ({"lookahead": 2}, "lookahead needs to be 0 with type: sync, got 2; type: async takes other values"),
        ({"type": "one_step_off", "update": "retract"}, "update .* drain with type: one_step_off, got retract"),
        ({"adapt_lookahead": True}, "adapt_lookahead needs to be false with type: sync, got true"),
        ({"type": "async", "lookahead": -1}, "greater than or equal to 0"),
    ],
)
def test_refused_settings(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScheduleConfig.model_validate(given)


def test_in_place_refuses_arguments_that_contradict_those_it_sets() -> None:
    schedule = ScheduleConfig(type="async", update="in_place")
    assert not list(schedule.engine_problems(SglangConfig()))
    wrong = {"disable_overlap_schedule": False, "disable_radix_cache": True, "chunked_prefill_size": 2048}
    overlap, chunked = schedule.engine_problems(SglangConfig(extra_args=wrong))
    assert overlap.startswith("schedule.update: in_place sets rollout.engine.extra_args.disable_overlap_schedule, ")
    assert "which needs to be true, got false: " in overlap
    assert "chunked_prefill_size, which needs to be -1, got 2048: " in chunked
    assert not list(ScheduleConfig(type="async").engine_problems(SglangConfig(extra_args=wrong)))
