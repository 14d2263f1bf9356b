"""Training loop of each algorithm: order of the calls, what is trained on, and which groups and prompts are not."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from megarl.algorithms import ppo
from megarl.algorithms.grpo import apply_overlong_penalty, differs_in
from megarl.algorithms.ppo import ConvergenceMonitor
from megarl.algorithms.prime import has_useful_accuracy
from megarl.config.algorithm import DapoConfig, PrimeConfig
from megarl.config.trainer import TrainerConfig
from megarl.errors import DataError
from megarl.losses import ImplicitPrmLoss, PolicyLoss, ValueLoss
from megarl.megatron.requests import ProfileSpec, TrainRequest
from megarl.run.rollout_batch import RolloutBatch
from megarl.tracking.progress import EventLog
from tests.algorithms.scripted_run import FinishedRun, run_script, token_values
from tests.algorithms.test_all_algorithms import columns_of
from tests.errors import expect_error
from tests.run.finished_groups import completion, finished_group, groups_with_rewards, run_config

KEYS = [(g, i) for g in range(2) for i in range(3)]
PRETRAINING = {"max_steps": 6}
NO_KL: dict[str, Any] = {"kl_reward": None}
OFFLOADING: dict[str, Any] = {"policy": {"offloads": True}}


def differing_rewards(label: str, number: int, sample: int) -> float:
    """Rewards that differ within every group."""
    return float(sample == number % 3)


def scalars(request: TrainRequest, name: str) -> list[float]:
    return [sample.scalars[name] for batch in request.mini_batches for sample in batch.samples]


def keys(request: TrainRequest) -> list[tuple[int, int]]:
    return [sample.key for batch in request.mini_batches for sample in batch.samples]


def grouped_advantages(rewards: list[list[float]]) -> list[float]:
    return [a for group in rewards for a in (np.array(group) - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)]


def test_grpo_samples_trains_and_syncs_weights(tmp_path: Path) -> None:
    run = run_script(tmp_path, {"type": "grpo", "kl_loss": None}, differing_rewards, steps=2)
    assert run.call_order == ["engines sample", "policy train", "weights push"] * 2
    assert run.pushed_versions == [0, 1, 2]
    first, second = run.arguments("engines", "sample")
    assert (first.prompts, second.prompts) == (("p0", "p1"), ("p2", "p3"))
    assert first.num_samples == 3
    assert first.seed != second.seed
    for request in run.arguments("policy", "train"):
        assert keys(request) == KEYS
        assert scalars(request, "advantages") == pytest.approx(grouped_advantages([[1, 0, 0], [0, 1, 0]]))
        assert request.columns == {}
        assert isinstance(request.loss, PolicyLoss)
        assert (request.loss.algorithm.type, request.loss.nll) == ("grpo", 0)
    assert [row["loss"] for row in run.metrics] == [1.0, 1.0]
    assert "kl/coefficient" not in run.metrics[0]


def test_length_norm_defaults_to_max_new_tokens(tmp_path: Path) -> None:
    for algorithm, want in (({}, 77), ({"length_norm": 10}, 10)):
        tree = {"type": "dr_grpo", **algorithm}
        run = run_script(tmp_path / str(want), tree, differing_rewards, rollout={"max_new_tokens": 77})
        (request,) = run.arguments("policy", "train")
        assert request.loss.length_norm == want


def test_kl_in_the_loss_needs_only_reference_logprobs(tmp_path: Path) -> None:
    run = run_script(tmp_path, {"type": "grpo"}, differing_rewards, models={"reference": {"offset": 0.5}})
    assert run.call_order == ["engines sample", "reference logprobs", "policy train", "weights push"]
    (request,) = run.arguments("policy", "train")
    assert request.columns.keys() == {"ref_logprobs"}
    for key, values in columns_of(request)["ref_logprobs"].items():
        assert values == pytest.approx(token_values(key, 4 + key[1], 0.5))
    assert scalars(request, "advantages") == pytest.approx(grouped_advantages([[1, 0, 0], [0, 1, 0]]))


@pytest.mark.parametrize(("adaptation", "growth"), [({"target": 0.1, "horizon": 60}, 1.02), ({}, 1.0)])
def test_kl_in_the_reward_uses_logprobs_before_the_update(
    adaptation: dict[str, float], growth: float, tmp_path: Path
) -> None:
    tree = {"type": "rloo", "kl_reward": {"coefficient": 0.1, **adaptation}}
    run = run_script(tmp_path, tree, differing_rewards, steps=3, models={"policy": {"offset": 0.5}})
    before_training = ["engines sample", "policy logprobs", "reference logprobs"]
    assert run.call_order[:5] == [*before_training, "policy train", "weights push"]
    # the KL of every token is 0.5, 5 times the target: the coefficient grows by 0.2 * 6 completions / 60
    coefficients = [0.1 * growth**step for step in range(3)]
    assert [row["kl/coefficient"] for row in run.metrics] == pytest.approx(coefficients)
    for coefficient, request in zip(coefficients, run.arguments("policy", "train"), strict=True):
        assert request.columns.keys() == {"old_logprobs"}
        rewards = np.array([differing_rewards("", g, i) - coefficient * 0.5 * (3 + i) for g, i in KEYS]).reshape(2, 3)
        want = (rewards - rewards.mean(1, keepdims=True)) * 1.5
        assert scalars(request, "advantages") == pytest.approx(want.flatten().tolist(), abs=1e-5)
    assert [row["kl/reference"] for row in run.metrics] == pytest.approx([0.5] * 3)


def test_routes_of_the_pass_for_old_logprobs_are_replayed_by_the_policy_alone(tmp_path: Path) -> None:
    trainer = {"moe": {"router_replay": "R2"}}
    tree = {"type": "ppo", "kl_reward": {"coefficient": 0.1}}
    run = run_script(tmp_path, tree, differing_rewards, trainer=trainer)
    assert run.call_order[:4] == ["engines sample", "policy logprobs", "policy routes", "reference logprobs"]
    (request,), (critic,) = run.arguments("policy", "train"), run.arguments("critic", "train")
    assert request.columns.keys() - {"advantages"} == {"old_logprobs", "routes"}
    assert columns_of(request)["routes"].keys() == set(KEYS)
    assert "routes" not in critic.columns
    assert [each.records_routes for each in run.arguments("reference", "logprobs")] == [False]


def test_dapo_resamples_until_it_has_enough_informative_groups(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float:
        return float(sample == 0 and (label, number) in {("step-1", 1), ("step-1-2", 0), ("step-1-2", 1)})

    tree = {"type": "dapo", "overlong": {"max_length": 6, "buffer": 2, "factor": 1.0}}
    run = run_script(tmp_path, tree, script)
    calls = run.arguments("engines", "sample")
    assert [call.label for call in calls] == ["step-1", "step-1-1", "step-1-2"]
    assert [call.prompts for call in calls] == [("p0", "p1"), ("p2", "p3"), ("p4", "p5")]
    assert len({call.seed for call in calls}) == 3
    (request,) = run.arguments("policy", "train")
    assert keys(request) == KEYS
    # lengths 3, 4, 5: the last one is halfway into the buffer
    assert scalars(request, "advantages") == pytest.approx(grouped_advantages([[1, 0, -0.5]] * 2))
    (row,) = run.metrics
    assert (row["dapo/batches"], row["dapo/informative_groups"]) == (3, 3)
    assert row["reward/mean"] == pytest.approx(0.5 / 3)
    assert row["reward/overlong"] == pytest.approx(-0.5 / 3)
    assert run.messages == []


def test_dapo_trains_on_a_partial_batch_after_max_batches(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float:
        return float(sample == 0 and (label, number) == ("step-1-1", 1))

    tree = {"type": "dapo", "overlong": None, "max_batches": 2, "num_mini_batches": 2}
    run = run_script(tmp_path, tree, script)
    (request,) = run.arguments("policy", "train")
    assert keys(request) == KEYS[:3]
    assert len(request.mini_batches) == 1
    assert run.messages == ["step 1: 1 of 2 informative groups in 2 batches (algorithm.max_batches)"]


def test_dapo_skips_the_update_without_informative_groups(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float:
        return float(sample == 0 and label == "step-2")

    run = run_script(tmp_path, {"type": "dapo", "overlong": None, "max_batches": 3}, script, steps=2)
    assert [call.label for call in run.arguments("engines", "sample")] == ["step-1", "step-1-1", "step-1-2", "step-2"]
    assert len(run.arguments("policy", "train")) == 1
    assert run.pushed_versions == [0, 2]
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert "loss" not in run.metrics[0]


def test_groups_are_informative_by_the_raw_metric() -> None:
    """A group that differs only in length is not informative, even if the overlong penalty changes its rewards."""

    def group(*values: tuple[int, float]) -> Any:
        terms = [(n, {"right": reward, "short": 1 / n}) for n, reward in values]
        return finished_group([completion([0] + [1] * n, reward=r["right"], rewards=r) for n, r in terms])

    batch = RolloutBatch(groups=[group((2, 1.0), (9, 1.0)), group((3, 0.0), (3, 1.0)), group((4, 0.0), (4, 0.0))])
    assert [differs_in("right", group) for group in batch.groups] == [False, True, False]
    assert [differs_in("short", group) for group in batch.groups] == [True, False, False]
    algorithm = DapoConfig(overlong={"max_length": 8, "buffer": 4, "factor": 2.0})
    apply_overlong_penalty(batch, algorithm, 100)
    assert batch.rewards == pytest.approx([1.0, 1.0 - 2 * 5 / 4, 0.0, 1.0, 0.0, 0.0])
    assert [differs_in("right", group) for group in batch.groups] == [False, True, False]


def test_remax_baseline_is_the_greedy_reward_of_the_same_prompt(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float:
        return 0.25 + 0.5 * number if label.endswith("-greedy") else float(sample)

    run = run_script(tmp_path, {"type": "remax", **NO_KL}, script)
    assert run.call_order == ["engines sample", "engines sample", "policy train", "weights push"]
    greedy, sampled = run.arguments("engines", "sample")
    assert greedy.prompts == sampled.prompts
    assert (greedy.num_samples, greedy.sampling.temperature) == (1, 0.0)
    assert (sampled.num_samples, sampled.sampling.temperature) == (3, 1.0)
    assert greedy.sampling.max_new_tokens == sampled.sampling.max_new_tokens
    (request,) = run.arguments("policy", "train")
    for (g, i), values in columns_of(request)["advantages"].items():
        assert values.tolist() == pytest.approx([0.0] + [i - 0.25 - 0.5 * g] * (3 + i))
    assert run.metrics[0]["remax/greedy_reward"] == 0.5


def test_ppo_trains_the_policy_after_the_critic_warmup(tmp_path: Path) -> None:
    tree = {"type": "ppo", **NO_KL, "critic": {"warmup_steps": 2, "clip": 0.3}}
    run = run_script(tmp_path, tree, differing_rewards, steps=3)
    critic_only_step = ["engines sample", "critic values", "critic train"]
    assert run.call_order == [*critic_only_step, *critic_only_step, *critic_only_step, "policy train", "weights push"]
    assert run.pushed_versions == [0, 3]
    for request in run.arguments("critic", "train"):
        assert request.loss == ValueLoss(clip=0.3)
        assert request.columns.keys() == {"values", "returns"}
        for key, values in columns_of(request)["values"].items():
            assert values == pytest.approx(token_values(key, 4 + key[1], 0.0))
    (request,) = run.arguments("policy", "train")
    assert request.columns.keys() == {"advantages"}
    assert ["loss" in row for row in run.metrics] == [False, False, True]
    assert [row["critic/loss"] for row in run.metrics] == [1.0] * 3


@pytest.mark.parametrize("algorithm", [{"critic": {"warmup_steps": 2}}, {"type": "vapo", "pretraining": PRETRAINING}])
def test_the_policy_is_offloaded_before_sampling_even_if_it_was_not_trained(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    """The log-probs of the KL penalty have loaded it onto the devices."""
    tree = {"type": "ppo", "kl_reward": {"coefficient": 0.1}, **algorithm}
    run = run_script(tmp_path, tree, differing_rewards, steps=3, models=OFFLOADING)
    methods = [call.method for call in run.log if call.target in ("policy", "engines")]
    steps = [step.split() for step in " ".join(methods).split("sample")]
    assert len(steps) > 3
    assert all(step[-1] == "offload" for step in steps), steps


@pytest.mark.parametrize("should_stop", [False, True])
def test_the_last_step_is_saved_before_the_policy_is_offloaded(should_stop: bool, tmp_path: Path) -> None:
    events = EventLog()

    def script(label: str, prompt: int, sample: int) -> float:
        if should_stop and label == "step-2":
            events.request_stop()
        return differing_rewards(label, prompt, sample)

    options: dict[str, Any] = {"steps": 5 if should_stop else 2, "events": events, "saves_checkpoints": True}
    run = run_script(tmp_path, {"kl_loss": None}, script, models=OFFLOADING, **options)
    assert run.arguments("checkpoint", "begin") == [2]
    assert run.call_order[-3:] == ["checkpoint begin", "weights push", "policy offload"]


def memory_calls(run: FinishedRun) -> str:
    """Return the calls that move memory or need it, without their models' names; W: weights, KV: cache of an engine."""
    engine = {("weights",): "W", ("kv_cache",): "KV", ("weights", "kv_cache"): "W+KV"}
    moves = ("release", "resume")
    return ", ".join(
        f"{c.method} {engine[c.argument]}" if c.method in moves else f"{c.target} {c.method}" for c in run.log
    )


def test_engines_release_what_the_trainer_needs_in_the_order_of_the_phases(tmp_path: Path) -> None:
    options: dict[str, Any] = {"models": OFFLOADING, "releases_memory": True}
    run = run_script(tmp_path / "a", {"kl_loss": {"coefficient": 0.1}}, differing_rewards, steps=2, **options)
    first = "policy offload, resume W, weights push, policy offload, resume W+KV"
    step = (
        "engines sample, release KV, reference logprobs, release W+KV, policy train, "
        "policy offload, resume W, weights push, policy offload, resume W+KV"
    )
    assert memory_calls(run).replace("policy logprobs, ", "") == f"{first}, {step}, {step}"
    options |= {"limits": {"reward": {"min": 100, "action": "skip"}}}  # no update: the engines keep their weights
    run = run_script(tmp_path / "skips", {"kl_loss": None}, differing_rewards, **options)
    assert memory_calls(run).partition("engines sample")[2] == ""


def test_engines_release_their_weights_for_an_update_of_a_critic_as_well(tmp_path: Path) -> None:
    algorithm = {"type": "ppo", "critic": {"warmup_steps": 1}, "kl_reward": {"coefficient": 0.1}}
    run = run_script(tmp_path, algorithm, differing_rewards, steps=2, models=OFFLOADING, releases_memory=True)
    _, warm_up, update = memory_calls(run).split("engines sample, ")
    assert warm_up.startswith("release KV, policy logprobs")
    end = "critic train, policy offload, resume W, weights push, policy offload, resume W+KV"
    assert warm_up.endswith(f"release W+KV, {end}, ")
    assert update.endswith(f"critic train, policy train, {end.removeprefix('critic train, ')}")
    assert run.pushed_versions == [0, 0, 2]


def test_a_critic_on_dedicated_slots_finishes_with_the_step(tmp_path: Path) -> None:
    run = run_script(tmp_path, {"type": "ppo", **NO_KL}, differing_rewards, steps=2, dedicated=frozenset({"critic"}))
    assert run.call_order == ["engines sample", "critic values", "critic train", "policy train", "weights push"] * 2
    assert [row["critic/loss"] for row in run.metrics] == [1.0] * 2


def test_pf_ppo_trains_critic_and_policy_on_resampled_completions(tmp_path: Path) -> None:
    tree = {"type": "pf_ppo", **NO_KL, "filter": "pow"}
    run = run_script(tmp_path, tree, differing_rewards, steps=2)
    for name in ("critic", "policy"):
        for request in run.arguments(name, "train"):
            # with weights s^2, only the correct completion can be drawn
            assert keys(request) == [(0, 0)] * 3 + [(1, 1)] * 3
            (batch,) = request.mini_batches
            assert batch.denominators.num_tokens == 3 * 3 + 3 * 4


def patch_monitor(patch: pytest.MonkeyPatch, min_explained_variance: float) -> None:
    """Let critics converge once the loss changes by less than 10 % over two steps."""
    monitor = partial(ConvergenceMonitor, window=2, settled=0.1, min_explained_variance=min_explained_variance)
    patch.setattr(ppo, "ConvergenceMonitor", monitor)


def vapo(folder: Path, pretraining: dict[str, Any], **options: Any) -> FinishedRun:
    tree = {"type": "vapo", "group_size": 3, "nll_coefficient": 0.2, "pretraining": pretraining}
    return run_script(folder, tree, differing_rewards, **options)


def test_vapo_pretrains_its_critic_until_it_converges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_monitor(monkeypatch, -1000.0)
    losses = {"losses": [9.0, 4.0, 2.0, 1.0, 3.0, 1.05, 8.0]}
    run = vapo(tmp_path, PRETRAINING | {"max_steps": 9}, models={"critic": losses})
    critic_only_step = ["engines sample", "critic values", "critic train"]
    # 1.05 is within 10% of 1.0, the loss two steps before
    assert run.call_order == critic_only_step * 6 + [*critic_only_step, "policy train", "weights push"]
    assert [row["pretraining/loss"] for row in run.pretraining] == [9.0, 4.0, 2.0, 1.0, 3.0, 1.05]
    calls = run.arguments("engines", "sample")
    assert len({call.label for call in calls}) == len({call.seed for call in calls}) == 7
    assert [call.prompts for call in calls] == [(f"p{2 * i}", f"p{2 * i + 1}") for i in range(7)]
    assert run.pushed_versions == [0, 1]
    # metrics of pretraining are not logged with the first step
    assert [row["critic/loss"] for row in run.metrics] == [8.0]


def test_vapo_ends_pretraining_on_convergence_or_after_max_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_monitor(monkeypatch, -1000.0)
    early = vapo(tmp_path / "early", PRETRAINING, models={"critic": {"losses": [3.0]}})
    assert len(early.pretraining) == 3
    patch_monitor(monkeypatch, 1.0)
    never = vapo(tmp_path / "never", PRETRAINING, models={"critic": {"losses": [3.0]}})
    assert len(never.pretraining) == 6
    none = vapo(tmp_path / "none", PRETRAINING | {"max_steps": 0})
    assert none.pretraining == []


def test_vapo_adds_nll_of_positive_completions(tmp_path: Path) -> None:
    run = vapo(tmp_path, PRETRAINING | {"max_steps": 1})
    pretrained, trained = run.arguments("critic", "train")
    assert pretrained.columns.keys() == trained.columns.keys() == {"values", "returns"}
    for (g, i), values in columns_of(pretrained)["returns"].items():
        assert values.tolist() == pytest.approx([0.0] + [differing_rewards("", g, i)] * (3 + i), abs=1e-5)
    (request,) = run.arguments("policy", "train")
    assert request.loss.nll == 0.2
    assert scalars(request, "positive") == [1, 0, 0, 0, 1, 0]
    (batch,) = request.mini_batches
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
        ([1.0] * 5, [0.9, 0.9, 0.4, 0.9, 0.4], [False, False, False, True, False]),  # both at the same step
    ],
)
def test_convergence_monitor(losses: list[float], explained: float | list[float], settled: list[bool]) -> None:
    monitor = ConvergenceMonitor(window=2, settled=0.05, min_explained_variance=0.5)
    each = explained if isinstance(explained, list) else [explained] * len(losses)
    assert list(map(monitor.converged, losses, each)) == settled


SAFE_TERMS = {"reward": {"terms": {"match": {"type": "numeric"}, "cost": {"type": "model", "path": "cost"}}}}


def test_safe_rlhf_updates_the_multiplier_with_the_costs_of_the_step(tmp_path: Path) -> None:
    models = {"reward cost": {"score": lambda key: 1.0 + key[1]}, "cost_critic": {"offset": 2.0}}
    tree = {"type": "safe_rlhf", **NO_KL, "cost_limit": 1.5, "multiplier_lr": 0.2, "whiten": False}
    tree |= {"critic": {"clip": 0.1}, "cost_critic": {"clip": 0.2}}
    run = run_script(tmp_path, tree, differing_rewards, models=models, **SAFE_TERMS)
    scoring = ["engines sample", "reward cost scores", "critic values", "cost_critic values"]
    assert run.call_order == [*scoring, "critic train", "cost_critic train", "policy train", "weights push"]
    (row,) = run.metrics
    multiplier = float(np.exp(0.2 * (2.0 - 1.5)))
    assert (row["safe_rlhf/cost"], row["safe_rlhf/multiplier"]) == pytest.approx((2.0, multiplier))
    assert row["reward/cost"] == 2.0
    assert row["reward/mean"] == pytest.approx(1 / 3)
    critics = {name: run.arguments(name, "train")[0] for name in ("critic", "cost_critic")}
    assert {name: request.loss.clip for name, request in critics.items()} == {"critic": 0.1, "cost_critic": 0.2}
    for (g, i), advantages in columns_of(run.arguments("policy", "train")[0])["advantages"].items():
        length = 3 + i
        values, costs = (token_values((g, i), 1 + length, offset)[1:] for offset in (0.0, 2.0))
        of_reward, of_cost = differing_rewards("", g, i) - values, 1.0 + i - costs
        want = (of_reward - multiplier * of_cost) / (1 + multiplier)
        assert advantages[1:] == pytest.approx(want, abs=1e-5)
        returns, cost_returns = (columns_of(critics[name])["returns"][g, i] for name in ("critic", "cost_critic"))
        assert returns[1:] == pytest.approx([differing_rewards("", g, i)] * length, abs=1e-5)
        assert cost_returns[1:] == pytest.approx([1.0 + i] * length, abs=1e-5)
        assert columns_of(critics["cost_critic"])["values"][g, i][1:] == pytest.approx(costs)


def test_reward_model_scores_are_weighted(tmp_path: Path) -> None:
    terms = {"match": {"type": "numeric", "weight": 2.0}, "liked": {"type": "model", "path": "rm", "weight": 0.5}}
    models = {"reward liked": {"score": lambda key: 10.0 * key[0] + key[1]}}
    reward = {"terms": terms, "eval_term": "match"}
    run = run_script(tmp_path, {"type": "dr_grpo"}, differing_rewards, models=models, reward=reward)
    assert run.call_order == ["engines sample", "reward liked scores", "policy train", "weights push"]
    rewards = np.array([2 * differing_rewards("", g, i) + 5.0 * g + 0.5 * i for g, i in KEYS]).reshape(2, 3)
    (request,) = run.arguments("policy", "train")
    want = (rewards - rewards.mean(1, keepdims=True)).flatten().tolist()
    assert scalars(request, "advantages") == pytest.approx(want, abs=1e-5)
    assert run.metrics[0]["reward/mean"] == pytest.approx(rewards.mean())


def test_prime_trains_its_reward_model_before_scoring(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float:
        return float(number == 0 and sample < 1)  # accuracy 1/3 in the first group, 0 in the second

    models = {"reward_model": {"offset": 0.3}}
    tree = {"type": "prime", "beta": 0.5, "process_coefficient": 1.0, "outcome_coefficient": 0.0}
    run = run_script(tmp_path, tree, script, models=models)
    scoring = ["engines sample", "reference logprobs", "reward_model train", "reward_model logprobs"]
    assert run.call_order == [*scoring, "policy train", "weights push"]
    (reward_model_request,), (request,) = run.arguments("reward_model", "train"), run.arguments("policy", "train")
    assert keys(reward_model_request) == keys(request) == KEYS[:3]
    assert reward_model_request.loss == ImplicitPrmLoss(beta=0.5)
    assert reward_model_request.columns.keys() == {"ref_logprobs"}
    assert scalars(reward_model_request, "outcomes") == [1, 0, 0]
    # all process rewards are 0.5 * 0.3, so all process advantages are 0
    for values in columns_of(request)["advantages"].values():
        assert values == pytest.approx(0, abs=1e-6)
    (row,) = run.metrics
    assert (row["prime/kept_groups"], row["reward_model/loss"]) == (1, 1.0)
    assert row["prime/process_reward"] == pytest.approx(0.15)


def test_prime_skips_the_update_if_no_group_passes_the_accuracy_filter(tmp_path: Path) -> None:
    def script(label: str, number: int, sample: int) -> float:
        return float(label == "step-1" or sample == 0)

    run = run_script(tmp_path, {"type": "prime"}, script, steps=2)
    assert len(run.arguments("reward_model", "train")) == len(run.arguments("policy", "train")) == 1
    assert run.pushed_versions == [0, 2]
    assert [row["reward/mean"] for row in run.metrics] == [1.0, pytest.approx(1 / 3)]
    assert run.messages == ["step 1: no group has an accuracy between min_accuracy and max_accuracy"]


def test_accuracy_limits_are_inclusive() -> None:
    groups = groups_with_rewards([0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1])
    middle = PrimeConfig(min_accuracy=0.25, max_accuracy=0.5)
    assert [has_useful_accuracy(middle, group) for group in groups] == [False, True, True, False, False]
    assert all(has_useful_accuracy(PrimeConfig(min_accuracy=0.0, max_accuracy=1.0), group) for group in groups)


def test_distillation_follows_the_teacher(tmp_path: Path) -> None:
    tree = {"type": "distillation", "teacher": {"path": "teacher"}}
    run = run_script(tmp_path, tree, differing_rewards, models={"teacher": {"offset": -0.25}})
    assert run.call_order == ["engines sample", "policy logprobs", "teacher logprobs", "policy train", "weights push"]
    (request,) = run.arguments("policy", "train")
    assert request.columns.keys() == {"advantages", "old_logprobs"}
    for values in columns_of(request)["advantages"].values():
        assert values[1:] == pytest.approx(-0.25, abs=1e-6)
    assert run.metrics[0]["distillation/reverse_kl"] == pytest.approx(0.25)


def test_only_the_chosen_steps_of_the_policy_are_traced(tmp_path: Path) -> None:
    profile = {"steps": [1, 3], "ranks": [0, 2]}
    run = run_script(tmp_path, {"type": "ppo"}, lambda *_: 1.0, steps=3, trainer={"profile": profile})
    folder = str(tmp_path / "profile")
    first, third = (ProfileSpec(folder=folder, step=step, ranks=(0, 2)) for step in (1, 3))
    assert [request.profile for request in run.arguments("policy", "train")] == [first, None, third]
    assert {request.profile for request in run.arguments("critic", "train")} == {None}


@pytest.mark.parametrize(("steps", "got"), [([1, 11], 11), ([0], 0)])
def test_steps_that_never_come_are_refused(steps: list[int], got: int) -> None:
    with pytest.raises(ValidationError, match=f"profile.steps needs steps from 1 to trainer.steps = 10, got {got}"):
        TrainerConfig.model_validate({"steps": 10, "profile": {"steps": steps}})


def first_is_solved(label: str, number: int, sample: int) -> float:
    """All samples of the first prompt of a call pass, and one of three of the second."""
    return 1.0 if number == 0 or sample == 0 else 0.0


def run_solving(
    folder: Path, steps: int, algorithm: str = "grpo", *, options: dict[str, Any] | None = None, **difficulty: float
) -> FinishedRun:
    data = {"difficulty": difficulty}
    return run_script(folder, {"type": algorithm}, first_is_solved, steps=steps, data=data, **(options or {}))


def num_trained(finished: FinishedRun) -> list[int]:
    return [len(request.payloads) for request in finished.arguments("policy", "train")]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "reinforce_pp"])
def test_solved_groups_are_replaced_by_further_batches(tmp_path: Path, algorithm: str) -> None:
    finished = run_solving(tmp_path, 2, algorithm, max_pass_rate=0.9)
    assert num_trained(finished) == [2, 2]
    calls = finished.arguments("engines", "sample")
    assert [call.prompts for call in calls] == [("p0", "p1"), ("p2", "p3"), ("p4", "p5"), ("p6", "p7")]
    assert finished.metrics[-1]["difficulty/pass_rate"] == pytest.approx((1 + 1 / 3) / 2)
    assert finished.metrics[-1]["difficulty/kept"] == 0.5


@pytest.mark.parametrize(
    ("difficulty", "expected"),
    [
        ({"min_pass_rate": 0.2, "max_pass_rate": 0.9, "max_batches": 1}, [1, 1]),
        ({"min_pass_rate": 0.5, "max_pass_rate": 0.6, "max_batches": 2}, []),
    ],
)
def test_a_step_trains_on_fewer_groups_after_the_last_batch_or_skips_the_update(
    tmp_path: Path, difficulty: dict[str, float], expected: list[int]
) -> None:
    finished = run_solving(tmp_path, 2, **difficulty)
    assert num_trained(finished) == expected
    assert len(finished.metrics) == 2


def test_an_asynchronous_schedule_replaces_single_groups(tmp_path: Path) -> None:
    schedule = {"type": "async", "lookahead": 1, "max_staleness": 2}
    finished = run_solving(tmp_path, 3, options={"schedule": schedule}, max_pass_rate=0.9)
    assert num_trained(finished) == [2, 2, 2]
    assert finished.metrics[-1]["schedule/filtered"] >= 4


def test_retired_prompts_are_not_sampled_again_and_resume_knows_them(tmp_path: Path) -> None:
    """Every second of 100 prompts is solved at once; two prompts a step."""
    finished = run_solving(tmp_path, 52, retire_after=1)
    calls = finished.arguments("engines", "sample")
    assert [call.prompts for call in calls[-2:]] == [("p1", "p3"), ("p5", "p7")]
    assert finished.metrics[-1]["difficulty/retired"] == 52
    resumed = run_solving(tmp_path, 53, options={"resumed": finished.run.state()}, retire_after=1)
    assert resumed.arguments("engines", "sample")[0].prompts == ("p9", "p11")


def test_a_prompt_with_a_failure_starts_to_count_again(tmp_path: Path) -> None:
    def solved_in_every_second_epoch(label: str, number: int, sample: int) -> float:
        return 0.0 if 50 < int(label.split("-")[1]) <= 100 and number == 0 else 1.0

    data = {"difficulty": {"retire_after": 2}}
    finished = run_script(tmp_path, {"type": "grpo"}, solved_in_every_second_epoch, steps=126, data=data)
    calls = finished.arguments("engines", "sample")
    # in the third epoch p1 and all others with an odd number are retired, in the fourth nothing else yet
    assert calls[100].prompts == calls[125].prompts == ("p0", "p2")


def test_a_run_without_prompts_ends(tmp_path: Path) -> None:
    with expect_error(DataError, "100", "retired", "prompt"):
        run_script(tmp_path, {"type": "grpo"}, lambda *_: 1.0, steps=52, data={"difficulty": {"retire_after": 1}})


@pytest.mark.parametrize(
    ("algorithm", "difficulty", "sections", "message"),
    [
        ("grpo", {"min_pass_rate": 0.9, "max_pass_rate": 0.5}, {}, "min_pass_rate needs to be at most max_pass_rate"),
        ("grpo", {"term": "taste"}, {}, "term needs the name of a rule of reward.terms, ['match'], got"),
        ("grpo", {"retire_after": 1}, {"schedule": {"type": "async"}}, "retire_after needs schedule.type: sync"),
        ("remax", {}, {}, "data.difficulty: with schedule.type: sync, remax samples the greedy completions"),
    ],
)
def test_bad_difficulties_are_refused(algorithm: str, difficulty: Any, sections: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        run_config({"type": algorithm}, data={"path": "x.jsonl", "difficulty": difficulty}, **sections)
