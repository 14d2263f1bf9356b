"""Evaluation: means, pass@k and sources, against enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from megarl.batch.trajectory import Prompt
from megarl.groups.group_stream import FinishedGroup
from megarl.rollout.engine import Sampling
from megarl.run.evaluation import evaluate, pass_at_k
from tests.run.finished_groups import completion, finished_group, run_config

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
        return [
            finished_group([completion([0, 1], rewards=each) for each in group], group_id)
            for group_id, group in enumerate(self.values)
        ]


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
    config = run_config(
        {},
        reward={"terms": TERMS},
        eval={"samples": 3, "pass_reward": 0.5},
        rollout={"sampling": {"temperature": 0.7}, "max_new_tokens": 9},
    )
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
