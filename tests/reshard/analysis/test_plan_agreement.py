"""Agreement of plans: all agree as planned, and changed plans are found."""

from dataclasses import replace

import numpy as np
import pytest

from megarl.reshard.analysis import plan_agreement
from megarl.reshard.analysis.plan_agreement import find_disagreements, representative_plans
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.planning.plan_cache import cached_index
from tests.reshard.scenarios import scenario


def index_of(strategy, case):
    arrangement = arrange(strategy, case)
    return cached_index(case.sources, arrangement.needs, case.topology, case.bucket_bytes, groups=arrangement.groups)


@pytest.mark.parametrize(
    ("strategy", "layout", "ranks"),
    [
        ("micro_dp", (1, 4, 4, 1, 2), [0, 1, 2, 3]),  # the groups of other replicas are of the same kinds
        ("micro_dp", (2, 2, 2, 2, 1), [0, 1, 4, 5]),
        ("exact", (1, 3, 2, 1, 2), [0, 1, 2, 4, 5]),
        ("exact", (2, 2, 2, 1, 8), [0, 1, 3, 6, 7]),
    ],
)
def test_representatives_of_a_plan_agree(strategy, layout, ranks):
    plans = representative_plans(index_of(strategy, scenario(*layout)))
    assert sorted(plan.rank for plan in plans) == ranks
    assert sum(len(plan.receives) for plan in plans) > 0
    assert find_disagreements(plans) == []


def test_a_message_in_another_round_is_found():
    first, *others = representative_plans(index_of("exact", scenario(1, 4, 1, 1, 1)))
    later = replace(first, sends=replace(first.sends, round=first.sends.round + 1))
    assert find_disagreements([later, *others])[0] == (
        "ranks 0 and 1 disagree about what the first sends the other in hop 0 of round 0"
    )
    none = replace(first, sends=first.sends.take(np.arange(0)))
    assert len(find_disagreements([none, *others])) == 3


def test_another_choice_of_all_gathers_is_found():
    first, second, *_ = representative_plans(index_of("micro_dp", scenario(1, 4, 1, 1, 2)))
    fewer = replace(first, gathered=first.gathered & (first.receives.item > 0))
    problems = find_disagreements([fewer, second])
    assert problems[-1] == "ranks 1 and 0 disagree about the all-gathers of round 0"


def test_too_many_representatives_are_not_planned(monkeypatch):
    monkeypatch.setattr(plan_agreement, "MAX_REPRESENTATIVES", 3)
    assert representative_plans(index_of("micro_dp", scenario(1, 4, 4, 1, 2))) is None
