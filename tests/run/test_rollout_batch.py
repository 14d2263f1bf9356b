"""What the controller makes of a step's completions: rewards, references, mini-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.functional import Denominators
from megarl.megatron.requests import LikelihoodLoss, ReturnsLoss, TrainWork, split_by_dp
from megarl.placement.rank_grid import RankGrid
from megarl.run.rollout_batch import Experience, metrics_of
from megarl.workers.payload import LocalPayload
from tests.run.finished_groups import completion, finished, of_rewards, run_config

SAMPLED = [[3, 1], [2, 2, 5], [4], [0, 6]]
"""Sampled tokens of each group's completions; each has 2 tokens of prompt, and a hole where there is room."""


def make_batch() -> Experience:
    def mask(count: int) -> list[int]:
        return [0, 0, *([1] * (count - 1) + [0] if count > 2 else []), *([1] if count > 2 else [1] * count)]

    groups = [[completion(mask(count), reward=count / 10) for count in group] for group in SAMPLED]
    return Experience(groups=[finished(group, g) for g, group in enumerate(groups)])


def config(mini_batches: int = 1, prompts: int = 4, **algorithm: Any) -> Any:
    return run_config(
        {"mini_batches": mini_batches, "prompts_per_step": prompts, "group_size": 2, **algorithm},
        trainer={"max_tokens_per_micro_batch": 123},
    )


def sampled_of(work: TrainWork) -> list[list[tuple[int, int]]]:
    return [[sample.key for sample in batch.samples] for batch in work.mini_batches]


def test_completions_are_counted_group_after_group() -> None:
    batch = make_batch()
    assert batch.keys == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (3, 0), (3, 1)]
    assert batch.group_ids == [0, 0, 1, 1, 1, 2, 3, 3]
    assert batch.first_of_groups == [0, 2, 5, 6]
    assert batch.rewards == batch.term("match") == [0.3, 0.1, 0.2, 0.2, 0.5, 0.4, 0.0, 0.6]
    assert [s.response_length for s in batch.summaries] == [n for group in SAMPLED for n in group]


def test_evaluation_work_names_every_completion_and_where_it_is() -> None:
    batch = make_batch()
    batch.picked = [0, 0]
    batch.scalars["advantages"] = [1.0] * 8
    work = batch.evaluation_work(config())
    assert [sample.key for sample in work.samples] == batch.keys
    for sample in work.samples:
        trajectory = work.payloads[sample.payload].fetch()[sample.index]
        assert sample.num_tokens == trajectory.num_tokens
        assert sample.scalars == {}
    assert work.max_tokens_per_micro_batch == 123


@pytest.mark.parametrize(
    ("mini_batches", "want"), [(1, [[0, 1, 2, 3]]), (2, [[0, 1], [2, 3]]), (4, [[0], [1], [2], [3]])]
)
def test_mini_batches_are_of_whole_groups_and_divide_by_their_own_counts(
    mini_batches: int, want: list[list[int]]
) -> None:
    batch = make_batch()
    work = batch.train_work(config(mini_batches, epochs=3), LikelihoodLoss(), {})
    assert sampled_of(work) == [[(g, i) for g in groups for i in range(len(SAMPLED[g]))] for groups in want]
    for one, groups in zip(work.mini_batches, want, strict=True):
        lengths = [n for g in groups for n in SAMPLED[g]]
        assert one.denominators == Denominators(num_tokens=sum(lengths), num_sequences=len(lengths))
    assert work.epochs == 3
    assert work.max_tokens_per_micro_batch == 123


@pytest.mark.parametrize("mini_batches", [3, 8])
def test_fewer_groups_than_were_asked_for_make_fewer_or_uneven_mini_batches(mini_batches: int) -> None:
    """As where a filter has left few."""
    work = make_batch().train_work(config(mini_batches, prompts=24), LikelihoodLoss(), {})
    keys = sampled_of(work)
    assert all(keys)
    assert len(keys) == min(mini_batches, 4)
    assert [key for batch in keys for key in batch] == make_batch().keys
    groups = [{group for group, _ in batch} for batch in keys]
    assert sum(map(len, groups)) == 4
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_completions_that_were_picked_several_times_count_as_often() -> None:
    batch = make_batch()
    batch.picked = [1, 1, 4, 2, 4, 7, 7, 7]
    batch.scalars["positive"] = [0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    work = batch.train_work(config(2), LikelihoodLoss(), {})
    assert sampled_of(work) == [[(0, 1), (0, 1), (1, 2), (1, 0), (1, 2)], [(3, 1), (3, 1), (3, 1)]]
    assert [one.denominators for one in work.mini_batches] == [
        Denominators(num_tokens=1 + 1 + 5 + 2 + 5, num_sequences=5, num_positive_tokens=1 + 1 + 5 + 5),
        Denominators(num_tokens=18, num_sequences=3, num_positive_tokens=0),
    ]


def test_a_mini_batch_in_which_nothing_was_sampled_divides_by_one() -> None:
    batch = Experience(groups=[finished([completion([0, 0]), completion([0])])])
    (one,) = batch.train_work(config(), LikelihoodLoss(), {}).mini_batches
    assert one.denominators == Denominators(num_tokens=1, num_sequences=2)


def test_a_loss_gets_what_it_asks_for_under_the_name_it_uses() -> None:
    batch = make_batch()
    cost_values: Any = LocalPayload([{key: np.zeros(3, np.float32) for key in batch.keys}])
    other: Any = LocalPayload([])
    batch.columns |= {"cost_values": cost_values, "advantages": other, "values": other}
    batch.scalars |= {"outcomes": list(map(float, range(8))), "advantages": [9.0] * 8, "positive": [1.0] * 8}
    asked: Any = {"values": "cost_values", "outcomes": "outcomes", "advantages": "advantages"}
    work = batch.train_work(config(), ReturnsLoss(clip=None), asked)
    # token by token where both are there
    assert work.columns == {"values": cost_values, "advantages": other}
    (one,) = work.mini_batches
    assert [sample.scalars for sample in one.samples] == [{"outcomes": float(n)} for n in range(8)]


@pytest.mark.parametrize("grid", [RankGrid(), RankGrid(dp=3), RankGrid(dp=2, cp=2)], ids=repr)
def test_samples_that_belong_together_are_neighbours_in_one_micro_batch(grid: RankGrid) -> None:
    groups = [finished([completion([0] + [1] * n)] * 2, n) for n in range(1, 30)]
    work = replace(
        Experience(groups=groups).train_work(config(prompts=29), LikelihoodLoss(), {}),
        together=2,
        max_tokens_per_micro_batch=70,
    )
    works = split_by_dp(work, grid)
    seen = []
    for dp in range(grid.dp):
        (mine,) = works[grid.output_rank(dp)].mini_batches
        for indices in mine.micro_batches:
            assert len(indices) % 2 == 0
            assert all(b == a + 1 and a % 2 == 0 for a, b in zip(indices[::2], indices[1::2], strict=True))
            seen += indices
    assert sorted(seen) == list(range(58))


def test_further_reward_terms_complete_the_weighted_sum() -> None:
    batch = make_batch()
    given = {"model": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], "cost": [0.5] * 8}
    batch.add_rewards(given, {"match": 2.0, "model": 0.1})
    for n, (summary, before) in enumerate(zip(batch.summaries, make_batch().rewards, strict=True)):
        assert summary.rewards == {"match": before, "model": given["model"][n], "cost": 0.5}
        assert summary.reward == pytest.approx(2 * before + 0.1 * given["model"][n])
    assert batch.term("cost") == [0.5] * 8


def test_a_term_that_is_added_is_part_of_the_sum_as_it_is() -> None:
    batch = make_batch()
    before = batch.rewards
    batch.add_to_rewards("overlong", [-0.1 * n for n in range(8)])
    assert batch.rewards == pytest.approx([reward - 0.1 * n for n, reward in enumerate(before)])
    assert batch.term("overlong") == [-0.1 * n for n in range(8)]
    assert batch.term("match") == before


def test_metrics_are_means_over_completions() -> None:
    batch = Experience(groups=of_rewards([1.0, 0.0], [0.5, 0.5], [0.0, 1.0, 1.0]))
    batch.scalars["advantages"] = [1.0, -1.0, 0.0, 0.0, -2.0, 1.5, 1.5]
    metrics = metrics_of(batch)
    assert metrics["reward/mean"] == metrics["reward/match"] == pytest.approx(4 / 7)
    assert metrics["reward/informative_groups"] == pytest.approx(2 / 3)
    assert metrics["response/length"] == 2
    assert metrics["response/truncated"] == 0
    assert metrics["policy_version/min"] == 0
    assert metrics["advantage/abs_mean"] == pytest.approx(1.0)
