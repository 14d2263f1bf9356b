"""What each algorithm's loop asks of whom, in which order, and what it trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.algorithms.dapo import informative, punish_overlong
from megarl.algorithms.ppo import draw_anew
from megarl.algorithms.prime import within_reach
from megarl.algorithms.vapo import Settling
from megarl.config.algorithms.algorithm import DapoConfig, PfPpoConfig, PrimeConfig, ValuePretrainingConfig
from megarl.megatron.requests import ImplicitRewardLoss, ReturnsLoss, SurrogateLoss, TrainWork
from megarl.run.events import EventLog
from megarl.run.rollout_batch import Experience
from tests.algorithms.scripted_run import Scripted, run_script, token_values
from tests.run.finished_groups import completion, finished, of_rewards

KEYS = [(g, i) for g in range(2) for i in range(3)]
PRETRAINING = {"max_steps": 6, "window": 2, "settled": 0.1, "min_explained_variance": -1000.0}
NO_KL: dict[str, Any] = {"kl_reward": None}


def differing(label: str, number: int, sample: int) -> float:
    """A reward in which all groups differ."""
    return float(sample == number % 3)


def column(work: TrainWork, name: str) -> dict[Any, np.ndarray]:
    payload: Any = work.columns[name]
    return {key: values for part in payload.fetch() for key, values in part.items()}


def scalars(work: TrainWork, name: str) -> list[float]:
    return [sample.scalars[name] for batch in work.mini_batches for sample in batch.samples]


def keys(work: TrainWork) -> list[tuple[int, int]]:
    return [sample.key for batch in work.mini_batches for sample in batch.samples]


def grouped_advantages(rewards: list[list[float]]) -> list[float]:
    return [a for group in rewards for a in (np.array(group) - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)]


def test_grpo_samples_compares_trains_and_pushes(tmp_path: Path) -> None:
    run = run_script(tmp_path, {"type": "grpo", "kl_loss": None}, differing, steps=2)
    assert run.order == ["engines sample", "policy train", "weights push"] * 2
    assert run.pushed == [0, 1, 2]
    first, second = run.works("engines", "sample")
    assert (first.prompts, second.prompts) == (("p0", "p1"), ("p2", "p3"))
    assert first.num_samples == 3
    assert first.seed != second.seed
    for work in run.works("policy", "train"):
        assert keys(work) == KEYS
        assert scalars(work, "advantages") == pytest.approx(grouped_advantages([[1, 0, 0], [0, 1, 0]]))
        assert work.columns == {}
        assert isinstance(work.loss, SurrogateLoss)
        assert (work.loss.algorithm.type, work.loss.nll) == ("grpo", 0)
    assert [row["loss"] for row in run.metrics] == [1.0, 1.0]
    assert "kl/coefficient" not in run.metrics[0]


def test_the_constant_that_sums_are_divided_by_is_the_longest_completion(tmp_path: Path) -> None:
    for algorithm, want in (({}, 77), ({"length_norm": 10}, 10)):
        tree = {"type": "dr_grpo", **algorithm}
        run = run_script(tmp_path / str(want), tree, differing, rollout={"max_new_tokens": 77})
        (work,) = run.works("policy", "train")
        assert work.loss.length_norm == want


def test_a_penalty_in_the_loss_asks_the_reference_alone(tmp_path: Path) -> None:
    run = run_script(tmp_path, {"type": "grpo"}, differing, models={"reference": {"offset": 0.5}})
    assert run.order == ["engines sample", "reference logprobs", "policy train", "weights push"]
    (work,) = run.works("policy", "train")
    assert work.columns.keys() == {"ref_logprobs"}
    for key, values in column(work, "ref_logprobs").items():
        assert values == pytest.approx(token_values(key, 4 + key[1], 0.5))
    assert scalars(work, "advantages") == pytest.approx(grouped_advantages([[1, 0, 0], [0, 1, 0]]))


def test_a_penalty_in_the_reward_compares_with_the_policy_before_its_update(tmp_path: Path) -> None:
    kl = {"coefficient": 0.1, "target": 0.1, "horizon": 60}
    tree = {"type": "rloo", "kl_reward": kl}
    run = run_script(tmp_path, tree, differing, steps=3, models={"policy": {"offset": 0.5}})
    assert run.order[:5] == [
        "engines sample",
        "policy logprobs",
        "reference logprobs",
        "policy train",
        "weights push",
    ]
    # every token is 0.5 away, 5 times the target: the coefficient grows by 0.2 * 6 completions / 60
    coefficients = [0.1 * 1.02**step for step in range(3)]
    assert [row["kl/coefficient"] for row in run.metrics] == pytest.approx(coefficients)
    for coefficient, work in zip(coefficients, run.works("policy", "train"), strict=True):
        assert work.columns.keys() == {"old_logprobs"}
        rewards = np.array([differing("", g, i) - coefficient * 0.5 * (3 + i) for g, i in KEYS]).reshape(2, 3)
        want = (rewards - rewards.mean(1, keepdims=True)) * 1.5
        assert scalars(work, "advantages") == pytest.approx(want.flatten().tolist(), abs=1e-5)
    assert [row["kl/reference"] for row in run.metrics] == pytest.approx([0.5] * 3)


def test_a_penalty_without_a_target_stays(tmp_path: Path) -> None:
    tree = {"type": "rloo", "kl_reward": {"coefficient": 0.1}}
    run = run_script(tmp_path, tree, differing, steps=2, models={"policy": {"offset": 0.5}})
    assert [row["kl/coefficient"] for row in run.metrics] == [0.1, 0.1]


def test_dapo_refills_until_it_has_enough_informative_groups(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float:
        return float(sample == 0 and (label, number) in {("step-1", 1), ("step-1-2", 0), ("step-1-2", 1)})

    tree = {"type": "dapo", "overlong": {"max_length": 6, "buffer": 2, "factor": 1.0}}
    run = run_script(tmp_path, tree, script)
    calls = run.works("engines", "sample")
    assert [call.label for call in calls] == ["step-1", "step-1-1", "step-1-2"]
    assert [call.prompts for call in calls] == [("p0", "p1"), ("p2", "p3"), ("p4", "p5")]
    assert len({call.seed for call in calls}) == 3
    (work,) = run.works("policy", "train")
    assert keys(work) == KEYS
    # lengths 3, 4, 5: the last one is half way into the buffer
    assert scalars(work, "advantages") == pytest.approx(grouped_advantages([[1, 0, -0.5]] * 2))
    (row,) = run.metrics
    assert (row["dapo/batches"], row["dapo/informative_groups"]) == (3, 3)
    assert row["reward/mean"] == pytest.approx(0.5 / 3)
    assert row["reward/overlong"] == pytest.approx(-0.5 / 3)
    assert run.notes == []


def test_dapo_trains_on_the_few_that_it_finds(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float:
        return float(sample == 0 and (label, number) == ("step-1-1", 1))

    tree = {"type": "dapo", "overlong": None, "max_batches": 2, "mini_batches": 2}
    run = run_script(tmp_path, tree, script)
    (work,) = run.works("policy", "train")
    assert keys(work) == KEYS[:3]
    assert len(work.mini_batches) == 1
    assert run.notes == ["step 1: 1 of 2 informative groups in 2 batches (algorithm.max_batches)"]


def test_dapo_trains_on_nothing_where_nothing_is_informative(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float:
        return float(sample == 0 and label == "step-2")

    run = run_script(tmp_path, {"type": "dapo", "overlong": None, "max_batches": 3}, script, steps=2)
    assert [call.label for call in run.works("engines", "sample")] == ["step-1", "step-1-1", "step-1-2", "step-2"]
    assert len(run.works("policy", "train")) == 1
    assert run.pushed == [0, 2]
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert "loss" not in run.metrics[0]


def test_groups_are_informative_by_the_raw_metric() -> None:
    """One whose lengths alone differ is not, whatever the penalty makes of its rewards."""

    def group(*values: tuple[int, float]) -> Any:
        return finished([completion([0] + [1] * n, reward=r, rewards={"right": r, "short": 1 / n}) for n, r in values])

    batch = Experience(groups=[group((2, 1.0), (9, 1.0)), group((3, 0.0), (3, 1.0)), group((4, 0.0), (4, 0.0))])
    assert informative(batch, "right") == [batch.groups[1]]
    assert informative(batch, "short") == [batch.groups[0]]
    algorithm = DapoConfig(overlong={"max_length": 8, "buffer": 4, "factor": 2.0})
    punish_overlong(batch, algorithm, 100)
    assert batch.rewards == pytest.approx([1.0, 1.0 - 2 * 5 / 4, 0.0, 1.0, 0.0, 0.0])
    assert informative(batch, "right") == [batch.groups[1]]


def test_length_is_not_punished_where_nothing_says_so() -> None:
    batch = Experience(groups=of_rewards([0.0, 1.0]))
    punish_overlong(batch, DapoConfig(overlong=None), 1)
    assert batch.rewards == [0.0, 1.0]
    assert batch.summaries[0].rewards == {"match": 0.0}


def test_remax_compares_with_the_greedy_completion_of_the_same_prompt(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float:
        return 0.25 + 0.5 * number if label.endswith("-greedy") else float(sample)

    run = run_script(tmp_path, {"type": "remax", **NO_KL}, script)
    assert run.order == ["engines sample", "engines sample", "policy train", "weights push"]
    greedy, sampled = run.works("engines", "sample")
    assert greedy.prompts == sampled.prompts
    assert (greedy.num_samples, greedy.sampling.temperature) == (1, 0.0)
    assert (sampled.num_samples, sampled.sampling.temperature) == (3, 1.0)
    assert greedy.sampling.max_new_tokens == sampled.sampling.max_new_tokens
    (work,) = run.works("policy", "train")
    for (g, i), values in column(work, "advantages").items():
        assert values.tolist() == pytest.approx([0.0] + [i - 0.25 - 0.5 * g] * (3 + i))
    assert run.metrics[0]["remax/greedy_reward"] == 0.5


def test_reinforce_pp_gives_each_token_its_advantage(tmp_path: Path) -> None:
    run = run_script(tmp_path, {"type": "reinforce_pp", **NO_KL}, differing)
    assert run.order == ["engines sample", "policy train", "weights push"]
    (work,) = run.works("policy", "train")
    advantages = np.concatenate([values[1:] for values in column(work, "advantages").values()])
    assert advantages.mean() == pytest.approx(0, abs=1e-6)
    assert advantages.std() == pytest.approx(1, abs=1e-5)


def test_ppo_trains_the_critic_and_then_the_policy_once_that_is_warm(tmp_path: Path) -> None:
    tree = {"type": "ppo", **NO_KL, "critic": {"warmup_steps": 2, "clip": 0.3}}
    run = run_script(tmp_path, tree, differing, steps=3)
    alone = ["engines sample", "critic values", "critic train"]
    assert run.order == [*alone, *alone, *alone, "policy train", "weights push"]
    assert run.pushed == [0, 3]
    for work in run.works("critic", "train"):
        assert work.loss == ReturnsLoss(clip=0.3)
        assert work.columns.keys() == {"values", "returns"}
        for key, values in column(work, "values").items():
            assert values == pytest.approx(token_values(key, 4 + key[1], 0.0))
    (work,) = run.works("policy", "train")
    assert work.columns.keys() == {"advantages"}
    assert ["loss" in row for row in run.metrics] == [False, False, True]
    assert [row["critic/loss"] for row in run.metrics] == [1.0] * 3


@pytest.mark.parametrize("algorithm", [{"critic": {"warmup_steps": 2}}, {"type": "vapo", "pretraining": PRETRAINING}])
def test_the_policy_leaves_the_devices_before_engines_sample_even_where_it_did_not_train(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    """It was asked about a penalty's log-probabilities, and is on them."""
    tree = {"type": "ppo", "kl_reward": {"coefficient": 0.1}, **algorithm}
    run = run_script(tmp_path, tree, differing, steps=3, models={"policy": {"offloads": True}})
    of_policy = [asked.what for asked in run.log if asked.who in ("policy", "engines") and asked.what != "onload"]
    steps = [step.split() for step in " ".join(of_policy).split("sample")]
    assert len(steps) > 3
    assert all(step[-1] == "offload" for step in steps), steps


@pytest.mark.parametrize("ends_early", [False, True])
def test_the_last_step_is_saved_before_the_engines_get_its_memory(ends_early: bool, tmp_path: Path) -> None:
    events = EventLog()

    def script(label: str, prompt: int, sample: int) -> float:
        if ends_early and label == "step-2":
            events.finish_early()
        return differing(label, prompt, sample)

    steps, models = 5 if ends_early else 2, {"policy": {"offloads": True}}
    run = run_script(tmp_path, {"kl_loss": None}, script, steps=steps, models=models, events=events, saves=True)
    assert run.works("checkpoint", "begin") == [2]
    assert run.order[-2:] == ["checkpoint begin", "policy offload"]


def test_a_critic_with_slots_of_its_own_is_done_when_the_step_is(tmp_path: Path) -> None:
    run = run_script(tmp_path, {"type": "ppo", **NO_KL}, differing, steps=2, apart=frozenset({"critic"}))
    assert run.order == ["engines sample", "critic values", "critic train", "policy train", "weights push"] * 2
    assert [row["critic/loss"] for row in run.metrics] == [1.0] * 2


def test_ppo_compares_with_a_reference_only_where_rewards_are_punished(tmp_path: Path) -> None:
    run = run_script(tmp_path, {"type": "ppo"}, differing)
    assert run.order[:4] == ["engines sample", "policy logprobs", "reference logprobs", "critic values"]
    (work,) = run.works("policy", "train")
    assert work.columns.keys() == {"advantages", "old_logprobs"}


def test_pf_ppo_trains_both_on_the_completions_that_were_drawn(tmp_path: Path) -> None:
    tree = {"type": "pf_ppo", **NO_KL, "filter": "pow"}
    run = run_script(tmp_path, tree, differing, steps=2)
    for name in ("critic", "policy"):
        for work in run.works(name, "train"):
            # by its square, only the completion that is right has a chance
            assert keys(work) == [(0, 0)] * 3 + [(1, 1)] * 3
            (batch,) = work.mini_batches
            assert batch.denominators.num_tokens == 3 * 3 + 3 * 4


def test_completions_are_drawn_from_their_own_group_and_the_same_again_with_the_same_seed() -> None:
    def draw(seed: int) -> list[int]:
        batch = Experience(groups=of_rewards([0.0, 0.5, 1.0, 0.7], [1.0, 1.0, 1.0, 0.9]))
        draw_anew(batch, PfPpoConfig(filter="max_random"), seed=seed)
        assert batch.picked is not None
        return batch.picked

    assert draw(1) == draw(1)
    drawn = [draw(seed) for seed in range(20)]
    assert len({tuple(each) for each in drawn}) > 10
    assert all(set(each[:4]) <= set(range(4)) and set(each[4:]) <= set(range(4, 8)) for each in drawn)


def vapo(folder: Path, pretraining: dict[str, Any], **how: Any) -> Scripted:
    tree = {"type": "vapo", "group_size": 3, "nll_coefficient": 0.2, "pretraining": pretraining}
    return run_script(folder, tree, differing, **how)


def test_vapo_pretrains_its_critic_until_it_has_settled(tmp_path: Path) -> None:
    losses = {"losses": [9.0, 4.0, 2.0, 1.0, 3.0, 1.05, 8.0]}
    run = vapo(tmp_path, PRETRAINING | {"max_steps": 9}, models={"critic": losses})
    alone = ["engines sample", "critic values", "critic train"]
    # 1.05 is within a tenth of 1.0, two steps before
    assert run.order == alone * 6 + [*alone, "policy train", "weights push"]
    assert [row["pretraining/loss"] for row in run.pretraining] == [9.0, 4.0, 2.0, 1.0, 3.0, 1.05]
    calls = run.works("engines", "sample")
    assert len({call.label for call in calls}) == len({call.seed for call in calls}) == 7
    assert [call.prompts for call in calls] == [(f"p{2 * i}", f"p{2 * i + 1}") for i in range(7)]
    assert run.pushed == [0, 1]
    # what was noted while pretraining is no part of the first step
    assert [row["critic/loss"] for row in run.metrics] == [8.0]


def test_vapo_ends_pretraining_early_and_in_any_case(tmp_path: Path) -> None:
    early = vapo(tmp_path / "early", PRETRAINING, models={"critic": {"losses": [3.0]}})
    assert len(early.pretraining) == 3
    unexplained = PRETRAINING | {"min_explained_variance": 1.0}
    never = vapo(tmp_path / "never", unexplained, models={"critic": {"losses": [3.0]}})
    assert len(never.pretraining) == 6
    none = vapo(tmp_path / "none", PRETRAINING | {"max_steps": 0})
    assert none.pretraining == []


def test_vapo_fits_the_likelihood_of_what_was_right(tmp_path: Path) -> None:
    run = vapo(tmp_path, PRETRAINING | {"max_steps": 1})
    pretrained, trained = run.works("critic", "train")
    assert pretrained.columns.keys() == trained.columns.keys() == {"values", "returns"}
    for (g, i), values in column(pretrained, "returns").items():
        assert values.tolist() == pytest.approx([0.0] + [differing("", g, i)] * (3 + i), abs=1e-5)
    (work,) = run.works("policy", "train")
    assert work.loss.nll == 0.2
    assert scalars(work, "positive") == [1, 0, 0, 0, 1, 0]
    (batch,) = work.mini_batches
    assert batch.denominators.num_positive_tokens == 3 + 4


@pytest.mark.parametrize(
    ("losses", "explained", "settled"),
    [
        ([1.0, 1.0], 0.9, [False, False]),
        ([1.0, 1.0, 1.0], 0.9, [False, False, True]),
        ([1.0, 9.0, 1.04, 9.2], 0.9, [False, False, True, True]),
        ([1.0, 9.0, 1.06, 8.0], 0.9, [False, False, False, False]),
        ([1.0, 1.0, 1.0], 0.5, [False, False, True]),
        ([1.0, 1.0, 1.0], 0.49, [False, False, False]),
        ([float("nan")] * 4, 0.9, [False] * 4),
    ],
)
def test_settling(losses: list[float], explained: float, settled: list[bool]) -> None:
    watch = Settling(ValuePretrainingConfig(window=2, settled=0.05, min_explained_variance=0.5))
    assert [watch.has_settled(loss, explained) for loss in losses] == settled


def test_settling_asks_again_once_more_is_explained() -> None:
    watch = Settling(ValuePretrainingConfig(window=1, settled=0.05, min_explained_variance=0.5))
    assert [watch.has_settled(1.0, explained) for explained in (0.9, 0.4, 0.6)] == [False, False, True]


SAFE_TERMS = {"reward": {"terms": {"match": {"type": "numeric"}, "cost": {"type": "model", "path": "cost"}}}}


def test_safe_rlhf_weighs_costs_by_what_they_were_in_this_step(tmp_path: Path) -> None:
    models = {"reward cost": {"score": lambda key: 1.0 + key[1]}, "cost_critic": {"offset": 2.0}}
    tree = {"type": "safe_rlhf", **NO_KL, "cost_limit": 1.5, "multiplier_lr": 0.2, "whiten": False}
    tree |= {"critic": {"clip": 0.1}, "cost_critic": {"clip": 0.2}}
    run = run_script(tmp_path, tree, differing, models=models, **SAFE_TERMS)
    assert run.order == [
        "engines sample",
        "reward cost scores",
        "critic values",
        "cost_critic values",
        "critic train",
        "cost_critic train",
        "policy train",
        "weights push",
    ]
    (row,) = run.metrics
    multiplier = float(np.exp(0.2 * (2.0 - 1.5)))
    assert (row["safe_rlhf/cost"], row["safe_rlhf/multiplier"]) == pytest.approx((2.0, multiplier))
    assert row["reward/cost"] == 2.0
    assert row["reward/mean"] == pytest.approx(1 / 3)
    critics = {name: run.works(name, "train")[0] for name in ("critic", "cost_critic")}
    assert {name: work.loss.clip for name, work in critics.items()} == {"critic": 0.1, "cost_critic": 0.2}
    for (g, i), advantages in column(run.works("policy", "train")[0], "advantages").items():
        length = 3 + i
        values, costs = (token_values((g, i), 1 + length, offset)[1:] for offset in (0.0, 2.0))
        of_reward, of_cost = differing("", g, i) - values, 1.0 + i - costs
        want = (of_reward - multiplier * of_cost) / (1 + multiplier)
        assert advantages[1:] == pytest.approx(want, abs=1e-5)
        returns, cost_returns = (column(critics[name], "returns")[g, i] for name in ("critic", "cost_critic"))
        assert returns[1:] == pytest.approx([differing("", g, i)] * length, abs=1e-5)
        assert cost_returns[1:] == pytest.approx([1.0 + i] * length, abs=1e-5)
        assert column(critics["cost_critic"], "values")[g, i][1:] == pytest.approx(costs)


def test_a_reward_model_s_score_counts_by_its_weight(tmp_path: Path) -> None:
    terms = {"match": {"type": "numeric", "weight": 2.0}, "liked": {"type": "model", "path": "rm", "weight": 0.5}}
    models = {"reward liked": {"score": lambda key: 10.0 * key[0] + key[1]}}
    tree = {"type": "dr_grpo"}
    run = run_script(tmp_path, tree, differing, models=models, reward={"terms": terms, "eval_term": "match"})
    assert run.order == ["engines sample", "reward liked scores", "policy train", "weights push"]
    rewards = np.array([2 * differing("", g, i) + 5.0 * g + 0.5 * i for g, i in KEYS]).reshape(2, 3)
    (work,) = run.works("policy", "train")
    want = (rewards - rewards.mean(1, keepdims=True)).flatten().tolist()
    assert scalars(work, "advantages") == pytest.approx(want, abs=1e-5)
    assert run.metrics[0]["reward/mean"] == pytest.approx(rewards.mean())


def test_prime_updates_its_reward_model_before_it_asks_it(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float:
        return float(number == 0 and sample < 1)  # a third of the first group, none of the second

    models = {"reward_model": {"offset": 0.3}}
    tree = {"type": "prime", "beta": 0.5, "process_coefficient": 1.0, "outcome_coefficient": 0.0}
    run = run_script(tmp_path, tree, script, models=models)
    assert run.order == [
        "engines sample",
        "reference logprobs",
        "reward_model train",
        "reward_model logprobs",
        "policy train",
        "weights push",
    ]
    (of_model,), (work,) = run.works("reward_model", "train"), run.works("policy", "train")
    assert keys(of_model) == keys(work) == KEYS[:3]
    assert of_model.loss == ImplicitRewardLoss(beta=0.5)
    assert of_model.columns.keys() == {"ref_logprobs"}
    assert scalars(of_model, "outcomes") == [1, 0, 0]
    # all process rewards are 0.5 * 0.3, so every token is as good as those of the others
    for values in column(work, "advantages").values():
        assert values == pytest.approx(0, abs=1e-6)
    (row,) = run.metrics
    assert row["prime/kept_groups"] == 1
    assert row["prime/process_reward"] == pytest.approx(0.15)
    assert row["reward_model/loss"] == 1.0


def test_prime_goes_on_where_no_prompt_is_within_reach(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float:
        return float(label == "step-1" or sample == 0)

    run = run_script(tmp_path, {"type": "prime"}, script, steps=2)
    assert len(run.works("reward_model", "train")) == len(run.works("policy", "train")) == 1
    assert run.pushed == [0, 2]
    assert [row["reward/mean"] for row in run.metrics] == [1.0, pytest.approx(1 / 3)]
    assert run.notes == ["step 1: no prompt is right between min_accuracy and max_accuracy of the time"]


def test_prompts_are_within_reach_with_the_limits() -> None:
    batch = Experience(groups=of_rewards([0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]))
    kept = within_reach(batch, PrimeConfig(min_accuracy=0.25, max_accuracy=0.5))
    assert kept.groups == batch.groups[1:3]
    assert within_reach(batch, PrimeConfig(min_accuracy=0.0, max_accuracy=1.0)).groups == batch.groups


def test_distillation_follows_the_teacher(tmp_path: Path) -> None:
    models = {"teacher": {"offset": -0.25}}
    tree = {"type": "distillation", "teacher": {"path": "teacher"}, "group_size": 3}
    run = run_script(tmp_path, tree, differing, models=models)
    assert run.order == ["engines sample", "policy logprobs", "teacher logprobs", "policy train", "weights push"]
    (work,) = run.works("policy", "train")
    assert work.columns.keys() == {"advantages", "old_logprobs"}
    for values in column(work, "advantages").values():
        assert values[1:] == pytest.approx(-0.25, abs=1e-6)
    assert run.metrics[0]["distillation/reverse_kl"] == pytest.approx(0.25)
