"""Episodes of several sequences: estimated as one sequence, trained token by token as one, counted once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.algorithms.grpo import group_estimates
from megarl.algorithms.ppo import ppo_estimates, vapo_estimates
from megarl.algorithms.reinforce import reinforce_estimates, remax_estimates
from megarl.batch.pack import EPISODE_TOKENS, pack
from megarl.batch.trajectory import join_segments, split_episodes
from megarl.config.algorithm import (
    GrpoConfig,
    PpoConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
    RlooConfig,
    VapoConfig,
)
from megarl.functional import aggregate
from megarl.losses.supervised_loss import SftLoss
from megarl.rollout.journal.journal import decode_group, encode_group
from megarl.rollout.rollout_worker import summarize
from megarl.run.rollout_batch import RolloutBatch, batch_metrics
from tests.algorithms.scripted_run import run_script
from tests.errors import expect_error
from tests.rollout.estimates import estimate_here, keys_of, make_job, token_column
from tests.run.finished_groups import completion, finished_group, run_config

MASKS = [[[[0, 1, 1], [0, 0, 1]], [[0, 1]]], [[[0, 1, 0, 1]], [[0, 1, 1, 1], [0, 1], [0, 0, 1, 1]]]]
"""By group, episode and segment: which tokens are sampled."""
REWARDS = [1.0, 0.0, 0.25, 2.0]
TURN_REWARDS = [[[(0.5,), (0.25,)], [()]], [[(0.0, 0.25)], [(1.0,), (-1.0,), (0.5,)]]]


def make_groups():
    return [
        [
            replace(completion(mask, reward=float(reward)), segment=s, turn_rewards=given[s])
            for masks, reward, given in zip(of_group, rewards, turn_rewards, strict=True)
            for s, mask in enumerate(masks)
        ]
        for of_group, rewards, turn_rewards in zip(MASKS, np.reshape(REWARDS, (2, 2)), TURN_REWARDS, strict=True)
    ]


def make_batch(groups):
    finished = []
    for g, group in enumerate(groups):
        each = finished_group(group, g)
        summaries = tuple(summarize(*segments) for segments in split_episodes(group))
        finished.append(replace(each, summary=replace(each.summary, trajectories=summaries)))
    return RolloutBatch(groups=finished)


def joined(groups):
    """Return each episode as one sequence; its prompts in between are as tool output."""
    return [[join_segments(segments) for segments in split_episodes(group)] for group in groups]


def run_estimator(groups, estimator, arguments, turn_weight):
    """Return the summary and the advantages of all tokens, if the estimator gives them."""
    columns = {"values": token_column(groups, np.random.default_rng(0).normal(size=22))}
    per_token = estimator is not group_estimates or turn_weight is not None
    outputs, scalars = ("advantages",) if per_token else (), {"greedy_rewards": [0.5, 0.5, 0.25, 0.25]}
    job = make_job(estimator, arguments, groups, REWARDS, columns, outputs, scalars=scalars, turn_weight=turn_weight)
    summary, columns = estimate_here(job, groups)
    return summary, np.concatenate([columns["advantages"][k] for k in keys_of(groups)]) if per_token else None


ESTIMATORS = [
    (group_estimates, (GrpoConfig(kl_loss=None), 0.0)),
    (group_estimates, (RlooConfig(kl_reward=None), 0.0)),
    (ppo_estimates, (PpoConfig(lam=0.9, gamma=0.95, kl_reward=None), 0.0)),
    (vapo_estimates, (VapoConfig(), 0.0)),
    (reinforce_estimates, (ReinforcePlusPlusConfig(kl_reward=None), 0.0)),
    (reinforce_estimates, (ReinforcePlusPlusBaselineConfig(), 0.0)),
    (remax_estimates, (RemaxConfig(kl_reward=None), 0.0)),
]


@pytest.mark.parametrize(("estimator", "arguments"), ESTIMATORS)
@pytest.mark.parametrize("turn_weight", [None, 0.5])
def test_segments_are_estimated_as_one_sequence(estimator, arguments, turn_weight):
    groups = make_groups()
    summary, advantages = run_estimator(groups, estimator, arguments, turn_weight)
    one_summary, one = run_estimator(joined(groups), estimator, arguments, turn_weight)
    assert len(summary.scalars["advantages"]) == 4  # episodes, of 7 sequences
    np.testing.assert_allclose(summary.scalars["advantages"], one_summary.scalars["advantages"], rtol=1e-6)
    if advantages is not None and one is not None:
        np.testing.assert_allclose(advantages, one, rtol=1e-6)


def test_rewards_of_turns_and_the_rest_add_up_to_the_reward():
    """GAE with lambda 1 and values 0 gives the reward-to-go of each token."""
    groups = make_groups()
    columns = {"values": token_column(groups, np.zeros(22))}
    config = PpoConfig(lam=1.0, gamma=1.0, whiten=False, kl_reward=None)
    job = make_job(ppo_estimates, (config, 0.0), groups, REWARDS, columns, ("advantages",), turn_weight=0.5)
    # episode 0: 0.5 * 0.5 and 0.5 * 0.25 for its turns, and 1 - 0.375 = 0.625 more at the end
    assert {key: column.tolist() for key, column in estimate_here(job, groups)[1]["advantages"].items()} == {
        (0, 0): [0.0, 1.0, 1.0],
        (0, 1): [0.0, 0.0, 0.75],
        (0, 2): [0.0, 0.0],
        (1, 0): [0.0, 0.25, 0.0, 0.25],
        (1, 1): [0.0, 2.0, 2.0, 2.0],
        (1, 2): [0.0, 1.5],
        (1, 3): [0.0, 0.0, 2.0, 2.0],
    }


def test_every_sampled_token_is_trained_once_and_means_count_episodes():
    batch = make_batch(make_groups())
    batch.scalars["advantages"] = [10.0, 20.0, 30.0, 40.0]
    assert batch.keys == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert batch.segment_keys == [[(0, 0), (0, 1)], [(0, 2)], [(1, 0)], [(1, 1), (1, 2), (1, 3)]]
    config = run_config({"num_mini_batches": 2, "prompts_per_step": 2, "group_size": 2})
    request = batch.train_request(config, SftLoss())
    (first, second) = request.mini_batches
    assert [sample.key for each in (first, second) for sample in each.samples] == [
        key for keys in batch.segment_keys for key in keys
    ]
    assert [each.denominators.num_sequences for each in (first, second)] == [2, 2]
    assert [each.denominators.num_tokens for each in (first, second)] == [4, 8]
    assert [sample.scalars[EPISODE_TOKENS] for sample in first.samples] == [3.0, 3.0, 1.0]
    assert [sample.num_tokens for sample in second.samples] == [4, 4, 2, 4]


def test_a_mean_over_the_tokens_of_an_episode_is_that_of_one_sequence():
    groups = make_groups()
    sizes = [len(segments) for group in groups for segments in split_episodes(group)]
    segments, one = ([trajectory for group in each for trajectory in group] for each in (groups, joined(groups)))
    totals = [float(trajectory.loss_mask.sum()) for trajectory in one]
    values = np.random.default_rng(1).normal(size=sum(t.num_tokens for t in one)).astype(np.float32)
    config = run_config({"prompts_per_step": 2, "group_size": 2})
    (mini_batch,) = make_batch(groups).train_request(config, SftLoss()).mini_batches
    results = []
    for trajectories, tokens in ((segments, np.repeat(totals, sizes)), (one, totals)):
        parts = np.split(values, np.cumsum([t.num_tokens for t in trajectories])[:-1])
        packed = pack(trajectories, {"loss": parts, EPISODE_TOKENS: [float(n) for n in tokens]})
        arguments = packed.columns["loss"], packed.mask_T, packed.sequence_tokens_T
        results.append(aggregate(*arguments, mode="seq-mean-token-mean", denominators=mini_batch.denominators))
    by_hand = np.mean([values_t[t.loss_mask].mean() for t, values_t in zip(one, parts, strict=True)])
    assert mini_batch.denominators.num_sequences == 4
    torch.testing.assert_close(results[0], results[1])
    assert float(results[0]) == pytest.approx(by_hand, rel=1e-5)


def test_an_episode_is_counted_once_in_metrics_and_resampling():
    batch = make_batch(make_groups())
    metrics = batch_metrics(batch)
    assert metrics["reward/mean"] == pytest.approx(3.25 / 4)
    assert metrics["response/length"] == 3.0
    assert metrics["rollout/forked_segments"] == 3.0
    assert metrics["rollout/turns"] == 2.0
    batch.sample_indices = [3, 3, 0]
    config = run_config({"prompts_per_step": 2, "group_size": 2})
    (mini_batch,) = batch.train_request(config, SftLoss()).mini_batches
    keys = [sample.key for sample in mini_batch.samples]
    assert keys == [(0, 0), (0, 1), *[(1, 1), (1, 2), (1, 3)] * 2]
    assert mini_batch.denominators.num_sequences == 3


def test_segments_survive_the_journal():
    group = make_groups()[1]
    decoded = decode_group(encode_group(group).to_pybytes())
    for got, want in zip(decoded, group, strict=True):
        assert (got.segment, got.turn_rewards) == (want.segment, want.turn_rewards)
    assert [len(segments) for segments in split_episodes(decoded)] == [1, 3]


@pytest.mark.parametrize("algorithm", [{"type": "grpo", "kl_loss": None}, {"type": "dapo"}, {"type": "rloo"}])
def test_a_run_with_turn_advantages_trains_on_a_column(algorithm, tmp_path):
    terms = {"match": {"type": "numeric"}, "game": {"type": "environment"}}
    tree = {**algorithm, "advantages_per": "turn"}
    run = run_script(tmp_path, tree, lambda label, number, sample: float(sample), reward={"terms": terms})
    (request,) = run.arguments("policy", "train")
    assert "advantages" in request.columns


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"type": "gspo"}, "algorithm.type: gspo computes importance ratios"),
        ({"type": "gmpo"}, "algorithm.type: gmpo computes geometric means of ratios"),
        ({"type": "prime"}, "algorithm.type: prime computes the loss of its reward model"),
        ({"rollout_is": {"kind": "sequence_tis"}}, "algorithm.rollout_is.kind: sequence_tis computes weights"),
        ({"type": "grpo"}, None),
        ({"type": "ppo"}, None),
    ],
)
def test_algorithms_over_whole_sequences_refuse_forks(algorithm, reason):
    found = run_config(algorithm).algorithm.refuses_forks
    assert found == (reason and f"{reason} over whole sequences")


@pytest.mark.parametrize("kind", ["prime", "distillation"])
def test_advantages_that_do_not_come_from_rewards_cannot_be_per_turn(kind):
    sections = {"teacher": {"path": "t"}} if kind == "distillation" else {}
    with expect_error(ValueError, "advantages_per"):
        run_config({"type": kind, "advantages_per": "turn", **sections})
