"""Rollout batch: rewards, forward and training requests, metrics; evaluation: means, pass@k, against enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.batch.trajectory import Prompt
from megarl.cluster.workers.dispatch import LocalPayload
from megarl.engines.engine import Sampling
from megarl.functional import Denominators
from megarl.losses import SftLoss, ValueLoss
from megarl.megatron.requests import TrainRequest
from megarl.run.group_sampler import evaluate, pass_at_k
from megarl.run.remote.rollout_group import FinishedGroup
from megarl.run.rollout_batch import RolloutBatch, batch_metrics
from tests.errors import expect_error
from tests.run.finished_groups import completion, finished_group, groups_with_rewards, run_config

NUM_SAMPLED = [[3, 1], [2, 2, 5], [4], [0, 6]]
"""Number of sampled tokens by group and completion; each has 2 prompt tokens, and those above 2 a gap in the mask."""


def make_batch() -> RolloutBatch:
    def mask(count: int) -> list[int]:
        return [0, 0, *([1] * (count - 1) + [0] if count > 2 else []), *([1] if count > 2 else [1] * count)]

    groups = [[completion(mask(count), reward=count / 10) for count in group] for group in NUM_SAMPLED]
    return RolloutBatch(groups=[finished_group(group, g) for g, group in enumerate(groups)])


def make_config(mini_batches: int = 1, prompts: int = 4, **algorithm: Any) -> Any:
    return run_config(
        {"num_mini_batches": mini_batches, "prompts_per_step": prompts, "group_size": 2, **algorithm},
        trainer={"max_tokens_per_micro_batch": 123},
    )


def mini_batch_keys(request: TrainRequest) -> list[list[tuple[int, int]]]:
    return [[sample.key for sample in batch.samples] for batch in request.mini_batches]


def test_completions_are_numbered_group_after_group() -> None:
    batch = make_batch()
    assert batch.keys == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (3, 0), (3, 1)]
    assert batch.group_ids == [0, 0, 1, 1, 1, 2, 3, 3]
    assert batch.group_offsets == [0, 2, 5, 6]
    assert batch.rewards == batch.reward_term("match") == [0.3, 0.1, 0.2, 0.2, 0.5, 0.4, 0.0, 0.6]
    assert [s.response_length for s in batch.summaries] == [n for group in NUM_SAMPLED for n in group]


def test_forward_request_refers_to_every_completion() -> None:
    batch = make_batch()
    batch.sample_indices = [0, 0]
    batch.scalars["advantages"] = [1.0] * 8
    request = batch.forward_request(make_config())
    assert [sample.key for sample in request.samples] == batch.keys
    for sample in request.samples:
        trajectory = request.payloads[sample.payload].fetch()[sample.index]
        assert sample.num_tokens == trajectory.num_tokens
        assert sample.scalars == {}
    assert request.max_tokens_per_micro_batch == 123


@pytest.mark.parametrize(
    ("mini_batches", "want"), [(1, [[0, 1, 2, 3]]), (2, [[0, 1], [2, 3]]), (4, [[0], [1], [2], [3]])]
)
def test_mini_batches_have_complete_groups_and_their_own_denominators(mini_batches: int, want: list[list[int]]) -> None:
    batch = make_batch()
    request = batch.train_request(make_config(mini_batches, ppo_epochs=3), SftLoss())
    assert mini_batch_keys(request) == [[(g, i) for g in groups for i in range(len(NUM_SAMPLED[g]))] for groups in want]
    for mini_batch, groups in zip(request.mini_batches, want, strict=True):
        lengths = [n for g in groups for n in NUM_SAMPLED[g]]
        assert mini_batch.denominators == Denominators(num_tokens=sum(lengths), num_sequences=len(lengths))
    assert request.epochs == 3
    assert request.max_tokens_per_micro_batch == 123


@pytest.mark.parametrize("mini_batches", [3, 8])
def test_fewer_groups_make_fewer_or_uneven_mini_batches(mini_batches: int) -> None:
    """As after a filter that drops groups."""
    request = make_batch().train_request(make_config(mini_batches, prompts=24), SftLoss())
    keys = mini_batch_keys(request)
    assert all(keys)
    assert len(keys) == min(mini_batches, 4)
    assert [key for batch in keys for key in batch] == make_batch().keys
    groups = [{group for group, _ in batch} for batch in keys]
    assert sum(map(len, groups)) == 4
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_repeated_sample_indices_count_repeatedly() -> None:
    batch = make_batch()
    batch.sample_indices = [1, 1, 4, 2, 4, 7, 7, 7]
    batch.scalars["positive"] = [0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    request = batch.train_request(make_config(2), SftLoss())
    assert mini_batch_keys(request) == [[(0, 1), (0, 1), (1, 2), (1, 0), (1, 2)], [(3, 1), (3, 1), (3, 1)]]
    assert [mini_batch.denominators for mini_batch in request.mini_batches] == [
        Denominators(num_tokens=1 + 1 + 5 + 2 + 5, num_sequences=5, num_positive_tokens=1 + 1 + 5 + 5),
        Denominators(num_tokens=18, num_sequences=3, num_positive_tokens=0),
    ]
    # without sampled tokens, means divide by one
    batch = RolloutBatch(groups=[finished_group([completion([0, 0]), completion([0])])])
    (mini_batch,) = batch.train_request(make_config(), SftLoss()).mini_batches
    assert mini_batch.denominators == Denominators(num_tokens=1, num_sequences=2)


def test_columns_and_scalars_are_renamed_for_the_loss() -> None:
    batch = make_batch()
    cost_values: Any = LocalPayload([{key: np.zeros(3, np.float32) for key in batch.keys}])
    other: Any = LocalPayload([])
    batch.columns |= {"cost_values": cost_values, "advantages": other, "values": other}
    batch.scalars |= {"outcomes": list(map(float, range(8))), "advantages": [9.0] * 8, "positive": [1.0] * 8}
    loss: Any = SimpleNamespace(columns=("values", "outcomes", "advantages", "old_logprobs"))
    request = batch.train_request(make_config(), loss, {"values": "cost_values"})
    # a per-token column takes precedence over a scalar of the same name
    assert request.columns == {"values": cost_values, "advantages": other}
    (mini_batch,) = request.mini_batches
    assert [sample.scalars for sample in mini_batch.samples] == [{"outcomes": float(n)} for n in range(8)]


def test_a_loss_that_reads_a_column_which_the_batch_lacks_is_refused() -> None:
    batch = make_batch()
    batch.scalars["advantages"] = [0.0] * 8
    with expect_error(ValueError, "ValueLoss", "'values'"):
        batch.train_request(make_config(), ValueLoss(clip=None))


def test_added_terms_are_logged_and_a_term_that_is_added_to_the_rewards_has_weight_one() -> None:
    batch = make_batch()
    values = {"model": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], "cost": [0.5] * 8}
    batch.add_terms(values)
    for n, (summary, before) in enumerate(zip(batch.summaries, make_batch().rewards, strict=True)):
        assert summary.rewards == {"match": before, "model": values["model"][n], "cost": 0.5}
        assert summary.reward == before
    assert batch.reward_term("cost") == [0.5] * 8
    batch = make_batch()
    before = batch.rewards
    batch.add_to_rewards("overlong", [-0.1 * n for n in range(8)])
    assert batch.rewards == pytest.approx([reward - 0.1 * n for n, reward in enumerate(before)])
    assert batch.reward_term("overlong") == [-0.1 * n for n in range(8)]
    assert batch.reward_term("match") == before


def test_metrics_are_means_over_completions() -> None:
    batch = RolloutBatch(groups=groups_with_rewards([1.0, 0.0], [0.5, 0.5], [0.0, 1.0, 1.0]))
    batch.scalars["advantages"] = [1.0, -1.0, 0.0, 0.0, -2.0, 1.5, 1.5]
    expected = {"reward/mean": 4 / 7, "reward/match": 4 / 7, "reward/informative_groups": 2 / 3, "response/length": 2}
    expected |= {"response/truncated": 0, "policy_version/min": 0, "advantage/abs_mean": 1.0}
    metrics = batch_metrics(batch)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def make_failing_batch() -> RolloutBatch:
    """Return a batch of groups with 2, 0 and 1 completions left, of 3 each."""

    def sampled(g: int, i: int, errors: str) -> Any:
        length = 1 + 3 * g + i
        return completion([0] + [1] * length, reward=length, reward_errors=dict.fromkeys(errors, "it failed"))

    failures = [["", "a", ""], ["a", "ab", "b"], ["b", "", "a"]]
    groups = [finished_group([sampled(g, i, e) for i, e in enumerate(group)], g) for g, group in enumerate(failures)]
    return RolloutBatch.from_sampled(groups)


def test_dropped_completions_are_left_out() -> None:
    batch = make_failing_batch()
    assert batch.keys == [(0, 0), (0, 2), (1, 1)]
    assert batch.rewards == [1.0, 3.0, 8.0]
    assert (batch.group_ids, batch.group_offsets) == ([0, 0, 1], [0, 2])
    assert [group.summary.group_id for group in batch.all_groups] == [0, 2, 1]
    assert [sample.key for sample in batch.forward_request(make_config()).samples] == batch.keys
    batch.add_to_rewards("overlong", [-0.5, -1.0, -2.0])
    assert batch.rewards == [0.5, 2.0, 6.0]
    batch.add_terms({"model": [1.0, 2.0, 3.0]})
    assert batch.rewards == [0.5, 2.0, 6.0]
    assert batch.reward_term("model") == [1.0, 2.0, 3.0]
    batch.scalars["advantages"] = batch.scalars["values"] = batch.scalars["returns"] = [0.1, 0.2, 0.3]
    (mini_batch,) = batch.train_request(make_config(), ValueLoss(clip=None)).mini_batches
    assert {s.key: s.scalars["returns"] for s in mini_batch.samples} == {(0, 0): 0.1, (0, 2): 0.2, (1, 1): 0.3}
    assert mini_batch.denominators == Denominators(num_tokens=1 + 3 + 8, num_sequences=3)
    assert batch.logged_advantages == [0.1, None, 0.2, None, 0.3, None, None, None, None]
    assert batch.num_dropped == 6
    metrics = batch_metrics(batch)
    assert metrics["reward/informative_groups"] == 0.5
    assert metrics["response/length"] == pytest.approx(4.0)
    # a group with too few completions is dropped
    batch = RolloutBatch.from_sampled(make_failing_batch().all_groups, min_completions=2)
    assert (batch.keys, len(batch.dropped_groups)) == ([(0, 0), (0, 2)], 2)
    assert batch.num_dropped == 7
    assert batch.logged_advantages == [0.0, None, 0.0] + [None] * 6


def test_sub_metrics_are_means_over_the_completions_that_have_them() -> None:
    group = [completion([0, 1], rewards={"a": 1.0, "a/len": n} if n else {"a": 1.0}) for n in (0.0, 2.0, 4.0)]
    metrics = batch_metrics(RolloutBatch(groups=[finished_group(group)]))
    assert (metrics["reward/a"], metrics["reward/a/len"]) == (1.0, 3.0)


def test_requests_of_lost_engines_are_counted() -> None:
    groups = groups_with_rewards([1.0, 0.0], [0.0, 1.0], [0.0, 0.0])
    assert not [name for name in batch_metrics(RolloutBatch.from_sampled(groups)) if "retried" in name]
    for n, counts in ((0, {"num_retried": 2, "num_kept_tokens": 30}), (2, {"num_retried": 1, "num_kept_tokens": 7})):
        groups[n] = replace(groups[n], summary=replace(groups[n].summary, **counts))
    metrics = batch_metrics(RolloutBatch(groups=groups[:2], dropped_groups=groups[2:]))
    assert (metrics["rollout/retried_requests"], metrics["rollout/kept_tokens"]) == (3.0, 37.0)


def test_metrics_of_each_source() -> None:
    groups = groups_with_rewards([1.0, 0.0], [0.0, 0.0], [0.5, 1.0])
    groups = [replace(g, summary=replace(g.summary, source=s)) for g, s in zip(groups, "aba", strict=True)]
    metrics = batch_metrics(RolloutBatch.from_sampled(groups))
    expected = {"source/a/": (2.0, 0.625, 2.0, 0.0), "source/b/": (1.0, 0.0, 2.0, 0.0)}
    names = ("groups", "reward", "length", "truncated")
    assert {name: value for name, value in metrics.items() if name.startswith("source/")} == {
        source + name: value for source, values in expected.items() for name, value in zip(names, values, strict=True)
    }


TERMS = {"match": {"type": "numeric"}, "form": {"type": "format"}}


class FakeRollout:
    """Returns completions with given values of the terms; None: the term failed."""

    def __init__(self, values: Sequence[Sequence[dict[str, float]]]) -> None:
        self.values, self.calls = values, list[tuple[int, Sampling, tuple[int, ...]]]()

    def collect(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, label: str, seed: tuple[int, ...]
    ) -> list[FinishedGroup]:
        self.calls.append((num_samples, sampling, seed))
        assert [len(group) for group in self.values] == [num_samples] * len(prompts)
        groups = [[completion([0, 1], rewards=each) for each in group] for group in self.values]
        return [finished_group(group, group_id) for group_id, group in enumerate(groups)]


def prompt(source: str = "", reward_terms: tuple[str, ...] | None = None) -> Prompt:
    return Prompt(prompt_id="p", text="", token_ids=(1,), row={}, source=source, reward_terms=reward_terms)


@pytest.mark.parametrize("num_passed", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_passing_sample(num_passed: int, k: int) -> None:
    passed = [i < num_passed for i in range(5)]
    subsets = list(combinations(passed, k))
    assert pass_at_k(5, num_passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_one_sample_is_greedy() -> None:
    rollout: Any = FakeRollout([[{"match": 1.0}], [{"match": 0.0}], [{"form": 0.0}]])
    evaluation = evaluate(run_config({}, reward={"terms": TERMS}), rollout, [prompt()] * 3, label="evaluate-1")
    assert rollout.calls == [(1, Sampling(temperature=0.0, max_new_tokens=512), ())]
    assert (evaluation.score, evaluation.num_dropped) == (0.5, 1)
    assert evaluation.metrics == {"eval/match": 0.5}


def test_several_samples_of_several_sources() -> None:
    sections = {"eval": {"samples": 3, "pass_reward": 0.5}, "reward": {"terms": TERMS}}
    config = run_config({}, rollout={"sampling": {"temperature": 0.7}, "max_new_tokens": 9}, **sections)
    values = [
        [{"match": 1.0, "form": 0.0}, {"match": 0.0, "form": 0.0}, {"match": 0.0, "form": 0.0}],
        [{"match": 0.6, "form": 0.0}, {"match": 1.0, "form": 0.0}, {"form": 0.0}],  # the term failed on one
        [{"form": 1.0}, {"form": 1.0}, {"form": 0.0}],
    ]
    prompts = [prompt("math"), prompt("math"), prompt("style", ("form",))]
    rollout: Any = FakeRollout(values)
    evaluation = evaluate(config, rollout, prompts, label="evaluate-1")
    assert rollout.calls == [(3, Sampling(temperature=0.7, max_new_tokens=9), (config.seed,))]
    assert evaluation.num_dropped == 1
    assert evaluation.metrics == pytest.approx(
        {
            "eval/math/match": (1 + 1.6) / 5,
            "eval/math/match/pass@2": (2 / 3 + 1) / 2,  # pairs with the first of three; both of two pass
            "eval/math/match/pass@3": 1.0,  # the second prompt has two scored samples only
            "eval/style/form": 2 / 3,
            "eval/style/form/pass@2": 1.0,
            "eval/style/form/pass@3": 1.0,
            "eval/match": (1 + 1.6 + 2) / 8,
            "eval/match/pass@2": (2 / 3 + 1 + 1) / 3,
            "eval/match/pass@3": 1.0,
        }
    )
    assert evaluation.score == evaluation.metrics["eval/match"]


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("forks", [False, True])
def test_columns_are_those_of_the_completions_one_by_one(drops, forks):
    rng = np.random.default_rng(0)
    groups = []
    for number in range(30):
        errors = [{"match": "failed"} if drops and rng.random() < 0.3 else {} for _ in range(4)]
        rewards = rng.random(4).tolist()
        group = finished_group(
            [completion([0, 1], reward=r, reward_errors=e) for r, e in zip(rewards, errors, strict=True)], number
        )
        segments = [(1,) * int(n) if forks and n > 1 else () for n in rng.integers(0, 4, 4)]
        groups.append(replace(group, summary=group.summary.with_columns(segment_tokens=segments)))
    batch = RolloutBatch.from_sampled(groups, min_completions=2)
    kept, keys, logged = [], [], []
    for p, group in enumerate(batch.groups):
        first = 0
        for summary in group.summary.trajectories:
            sequences = list(range(first, first + summary.num_segments))
            first += summary.num_segments
            if summary.is_dropped:
                logged += [None] * summary.num_segments
            else:
                logged += [float(len(kept))] * summary.num_segments
                kept.append(summary)
                keys += [[p, s] for s in sequences]
    logged += [
        None for group in batch.dropped_groups for each in group.summary.trajectories for _ in range(each.num_segments)
    ]
    batch.scalars["advantages"] = [float(n) for n in range(len(kept))]
    assert batch.kept.sequence_keys.tolist() == keys
    assert batch.kept.column("finish_reason") == [each.finish_reason for each in kept]
    assert batch.rewards == [each.reward for each in kept] == [each.reward for each in batch.summaries]
    assert batch.mean_reward == {"reward/mean": sum(each.reward for each in kept) / len(kept)}
    assert batch.logged_advantages == logged
    assert (batch.num_dropped > 0, len(logged) > len(kept)) == (drops, drops or forks)
