"""Estimators of all algorithms against reference loops over completions, including tokens that are not sampled.

Legend: N completions; `sampled` are the places of a completion's sampled tokens; values are those of these tokens, by
completion.
"""

import itertools
import math
from dataclasses import replace
from functools import partial
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest
import torch

from megarl.algorithms.grpo import group_estimates
from megarl.algorithms.ppo import monte_carlo_estimates, ppo_estimates, safe_estimates, vapo_estimates
from megarl.algorithms.prime import prime_estimates
from megarl.algorithms.reinforce import distillation_estimates, reinforce_estimates, remax_estimates
from megarl.cluster.workers.dispatch import LocalPayload
from megarl.config.algorithm import (
    DrGrpoConfig,
    GrpoConfig,
    PpoConfig,
    PrimeConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
    RlooConfig,
    SafeRlhfConfig,
    VapoConfig,
)
from megarl.config.policy import KlRewardConfig
from megarl.megatron.request_samples import ComputedColumn
from megarl.rollout.estimate_job import TOKENS_PER_WORKER, estimate_completions, share_groups
from megarl.rollout.estimators import EstimatorOutput, is_by_completions, make_token_batch
from tests.errors import expect_error
from tests.rollout.estimates import assert_same_bits, estimate_here, keys_of, make_job, token_column
from tests.run.finished_groups import completion

SIZES = (2, 4, 3)
NOTHING_SAMPLED = 3
ENDS_WITH_TOOL_OUTPUT = 5


def make_trajectories():
    rng = np.random.default_rng(0)
    for n in range(sum(SIZES)):
        mask = (rng.random(int(rng.integers(3, 15))) < 0.7).astype(int)
        mask[0], mask[1] = 0, 1
        if n == NOTHING_SAMPLED:
            mask[:] = 0
        mask[-1] = n not in (NOTHING_SAMPLED, ENDS_WITH_TOOL_OUTPUT)
        yield completion(mask.tolist())


TRAJECTORIES = list(make_trajectories())
GROUPS = [TRAJECTORIES[end - size : end] for end, size in zip(itertools.accumulate(SIZES), SIZES, strict=True)]
KEYS = keys_of(GROUPS)
N = len(TRAJECTORIES)
SAMPLED = [np.flatnonzero(t.loss_mask).tolist() for t in TRAJECTORIES]
REWARDS = np.random.default_rng(1).normal(size=N).round(2).tolist()
GREEDY_REWARDS = [0.5 * g for g, _ in KEYS]
COSTS = np.random.default_rng(2).normal(size=N).round(2).tolist()
MEMBERS = [[n for n, key in enumerate(KEYS) if key[0] == g] for g in range(len(GROUPS))]
NAMES = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "reward_logprobs", "values", "cost_values")
COLUMNS = {
    name: [
        np.random.default_rng((3, c, n)).normal(size=t.num_tokens).astype(np.float32)
        for n, t in enumerate(TRAJECTORIES)
    ]
    for c, name in enumerate(NAMES)
}


def sampled_values(name):
    return [[float(column[t]) for t in sampled] for column, sampled in zip(COLUMNS[name], SAMPLED, strict=True)]


def run_estimator(estimator, *arguments, outputs):
    """Run the estimator as workers do, with columns in two parts; check that unsampled tokens have 0.

    Also check that the result has the same bits if several workers share the groups.
    """
    parts = {
        name: LocalPayload([{KEYS[n]: column[n] for n in half} for half in (range(0, N, 2), range(1, N, 2))])
        for name, column in COLUMNS.items()
    }
    scalars = {"greedy_rewards": GREEDY_REWARDS, "costs": COSTS}
    job = make_job(estimator, arguments, GROUPS, REWARDS, parts, outputs, scalars=scalars)
    found, columns = estimate_here(job, GROUPS)
    for workers in ([0, 3, 0], [1, 2, 0]):
        assert_same_bits((found, columns), estimate_here(job, GROUPS, workers))
    out = {}
    for name in outputs:
        merged = columns[name]
        assert merged.keys() == set(KEYS)
        out[name] = [[float(merged[key][t]) for t in sampled] for key, sampled in zip(KEYS, SAMPLED, strict=True)]
        for key, trajectory in zip(KEYS, TRAJECTORIES, strict=True):
            assert merged[key].dtype == np.float32
            assert not merged[key][~trajectory.loss_mask].any()
    return found, out


def flatten(values):
    return list(itertools.chain(*values))


def assert_close(got, want):
    assert [len(each) for each in got] == [len(each) for each in want]
    assert flatten(got) == pytest.approx(flatten(want), rel=1e-4, abs=1e-5)


KINDS = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
KLS = [None, ("k1", 0.3), ("k2", 0.2), ("k3", 0.1)]


def token_kl(kl):
    """Return the KL estimate of each sampled token, without the coefficient."""
    kind = KINDS["k1" if kl is None else kl[0]]
    pairs = zip(sampled_values("old_logprobs"), sampled_values("ref_logprobs"), strict=True)
    return [[0.0 if kl is None else kind(a - b) for a, b in zip(new, ref, strict=True)] for new, ref in pairs]


def token_rewards(kl, *, rewards=REWARDS, factor=-1.0, of_unsampled=False):
    """Return the reward at the last sampled token plus `factor` times the penalty at every sampled token.

    Args:
        of_unsampled: append the reward of a completion without sampled tokens as well.
    """
    out = [[factor * (kl[1] if kl else 0.0) * d for d in each] for each in token_kl(kl)]
    for each, reward in zip(out, rewards, strict=True):
        if each:
            each[-1] += reward
        elif of_unsampled:
            each.append(reward)
    return out


def run_with_kl(estimator, section, kl, *arguments, outputs):
    """Run an estimator whose configuration is `section(kl_reward=...)`, and check the metric of the KL divergence."""
    kl_reward, coefficient = None, 0.0
    if kl is not None:  # the section's own coefficient must not be used, but the current one
        kl_reward, coefficient = KlRewardConfig(kind=kl[0], coefficient=9.0), kl[1]
    found, got = run_estimator(estimator, section(kl_reward=kl_reward), coefficient, *arguments, outputs=outputs)
    if kl is None:
        assert "kl/reference" not in found.metric_values
    else:
        assert found.metric_values["kl/reference"] == pytest.approx(fmean(flatten(token_kl(kl))), rel=1e-4, abs=1e-6)
    return found, got


def check_advantages(found, got, want):
    """Compare the advantages of tokens, and their means over completions."""
    assert_close(got["advantages"], want)
    means = [fmean(each) if each else 0.0 for each in want]
    assert found.scalars["advantages"] == pytest.approx(means, rel=1e-4, abs=1e-5)


def check_returns(found, got, want, prefix=""):
    """Compare the returns of a critic, and the share of their variance that its values explain."""
    assert_close(got[f"{prefix}returns"], want)
    rest = [r - v for r, v in zip(flatten(want), flatten(sampled_values(f"{prefix}values")), strict=True)]
    share = 1 - (pstdev(rest) / pstdev(flatten(want))) ** 2
    assert found.metric_values[f"{prefix}critic/explained_variance"] == pytest.approx(share, rel=1e-4)


def whiten_values(values):
    mean, deviation = fmean(flatten(values)), pstdev(flatten(values))
    return [[(v - mean) / (deviation + 1e-8) for v in each] for each in values]


def returns_to_go(rewards, gamma):
    return [[sum(gamma**k * r for k, r in enumerate(each[t:])) for t in range(len(each))] for each in rewards]


def gae_loop(rewards, values, gamma, lam):
    advantages, returns = [], []
    for each, value, lam_n in zip(rewards, values, lam, strict=True):
        deltas = [r + gamma * (value[t + 1] if t + 1 < len(each) else 0) - value[t] for t, r in enumerate(each)]
        advantage = [sum((gamma * lam_n) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(each))]
        advantages.append(advantage)
        returns.append([a + v for a, v in zip(advantage, value, strict=True)])
    return advantages, returns


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("kind", [GrpoConfig, DrGrpoConfig, RlooConfig])
def test_group_estimates(kind, kl):
    found, _ = run_with_kl(group_estimates, partial(kind, kl_loss=None), kl, outputs=())
    rewards, want = [sum(each) for each in token_rewards(kl, of_unsampled=True)], []
    for (g, i), reward in zip(KEYS, rewards, strict=True):
        group = [rewards[n] for n in MEMBERS[g]]
        base = fmean(group[:i] + group[i + 1 :] if kind is RlooConfig else group)
        want.append((reward - base) / (stdev(group) + 1e-6 if kind is GrpoConfig else 1.0))
    assert found.scalars["advantages"] == pytest.approx(want, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kl", KLS)
def test_reinforce_pp_estimates(kl):
    section = partial(ReinforcePlusPlusConfig, gamma=0.9)
    found, got = run_with_kl(reinforce_estimates, section, kl, outputs=("advantages",))
    check_advantages(found, got, whiten_values(returns_to_go(token_rewards(kl), 0.9)))


@pytest.mark.parametrize("kl", KLS)
def test_reinforce_pp_baseline_estimates(kl):
    section = partial(ReinforcePlusPlusBaselineConfig, kl_loss=None)
    found, got = run_with_kl(reinforce_estimates, section, kl, outputs=("advantages",))
    rewards = [sum(each) for each in token_rewards(kl, of_unsampled=True)]
    means = [fmean(rewards[m] for m in members) for members in MEMBERS for _ in members]
    check_advantages(found, got, whiten_values([[rewards[n] - means[n]] * len(SAMPLED[n]) for n in range(N)]))


@pytest.mark.parametrize("kl", KLS)
def test_remax_estimates(kl):
    found, got = run_with_kl(remax_estimates, RemaxConfig, kl, outputs=("advantages",))
    to_go = returns_to_go(token_rewards(kl), 1.0)
    want = [[r - base for r in each] for each, base in zip(to_go, GREEDY_REWARDS, strict=True)]
    check_advantages(found, got, want)


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("kl", KLS)
def test_ppo_estimates(kl, whiten):
    section = partial(PpoConfig, gamma=0.97, lam=0.8, whiten=whiten)
    found, got = run_with_kl(ppo_estimates, section, kl, outputs=("advantages", "returns"))
    advantages, returns = gae_loop(token_rewards(kl), sampled_values("values"), 0.97, [0.8] * N)
    check_advantages(found, got, whiten_values(advantages) if whiten else advantages)
    check_returns(found, got, returns)


@pytest.mark.parametrize("alpha", [None, 0.4])
@pytest.mark.parametrize("kl", KLS[:2])
def test_vapo_estimates(kl, alpha):
    section = partial(VapoConfig, gamma=0.97, lam=0.9, whiten=False, length_alpha=alpha)
    found, got = run_with_kl(vapo_estimates, section, kl, outputs=("advantages", "returns"))
    rewards = token_rewards(kl)
    advantages, returns = gae_loop(rewards, sampled_values("values"), 0.97, [0.9] * N)
    if alpha is not None:
        lams = [1 - 1 / max(alpha * len(sampled), 1) for sampled in SAMPLED]
        assert len(set(lams)) > 2
        assert found.metric_values["vapo/lambda"] == pytest.approx(fmean(lams), rel=1e-5)
        advantages, _ = gae_loop(rewards, sampled_values("values"), 0.97, lams)
    check_advantages(found, got, advantages)
    check_returns(found, got, returns)


@pytest.mark.parametrize("kl", KLS[:2])
def test_pretraining_estimates_are_monte_carlo_returns(kl):
    section = partial(VapoConfig, gamma=0.97, lam=0.5)
    found, got = run_with_kl(monte_carlo_estimates, section, kl, outputs=("returns",))
    assert not found.scalars
    check_returns(found, got, returns_to_go(token_rewards(kl), 0.97))


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("kl", KLS)
def test_safe_rlhf_estimates(kl, whiten):
    section = partial(SafeRlhfConfig, gamma=0.97, lam=0.8, whiten=whiten)
    found, got = run_with_kl(safe_estimates, section, kl, 1.7, outputs=("advantages", "returns", "cost_returns"))
    of_reward, returns = gae_loop(token_rewards(kl, factor=-0.5), sampled_values("values"), 0.97, [0.8] * N)
    costs = token_rewards(kl, rewards=COSTS, factor=0.5)
    of_cost, cost_returns = gae_loop(costs, sampled_values("cost_values"), 0.97, [0.8] * N)
    pairs = zip(of_reward, of_cost, strict=True)
    weighed = [[(r - 1.7 * c) / 2.7 for r, c in zip(a, b, strict=True)] for a, b in pairs]
    check_advantages(found, got, whiten_values(weighed) if whiten else weighed)
    check_returns(found, got, returns)
    check_returns(found, got, cost_returns, "cost_")


def test_prime_estimates():
    algorithm = PrimeConfig(beta=0.2, process_coefficient=3.0, outcome_coefficient=2.0)
    found, got = run_estimator(prime_estimates, algorithm, outputs=("advantages",))
    pairs = zip(sampled_values("reward_logprobs"), sampled_values("ref_logprobs"), strict=True)
    process = [[0.2 * (a - b) for a, b in zip(new, ref, strict=True)] for new, ref in pairs]
    means = [fmean(each) if each else 0.0 for each in process]
    want = []
    for n, (g, _) in enumerate(KEYS):
        others = [m for m in MEMBERS[g] if m != n]
        base = fmean(means[m] for m in others)
        outcome = REWARDS[n] - fmean(REWARDS[m] for m in others)
        want.append([3.0 * sum(r - base for r in process[n][t:]) + 2.0 * outcome for t in range(len(process[n]))])
    check_advantages(found, got, want)
    assert found.metric_values == {"prime/process_reward": pytest.approx(fmean(flatten(process)), rel=1e-4)}


def test_distillation_estimates():
    found, got = run_estimator(distillation_estimates, outputs=("advantages",))
    pairs = zip(sampled_values("teacher_logprobs"), sampled_values("old_logprobs"), strict=True)
    want = [[a - b for a, b in zip(teacher, student, strict=True)] for teacher, student in pairs]
    check_advantages(found, got, want)
    assert found.metric_values == {"distillation/reverse_kl": pytest.approx(-fmean(flatten(want)), rel=1e-4)}


def test_sequence_sums_are_exact_after_large_values():
    """A cumulative sum in float32 would round them away; values of tokens that were not sampled do not count."""
    groups = [[completion([0] + [1] * 5000), completion([0, 1])]]
    tokens = make_token_batch(groups, [0.0, 0.0], {})
    values_T = torch.full((5003,), 1e4)
    values_T[[0, -2, -1]] = torch.tensor([torch.nan, torch.nan, 0.123])
    assert tokens.sequence_sums(values_T).tolist() == pytest.approx([5e7, 0.123], rel=1e-6)


def test_explained_variance_of_good_constant_and_bad_values():
    tokens = make_token_batch(GROUPS, REWARDS, {})
    returns_T = torch.from_numpy(np.random.default_rng(4).normal(size=len(tokens.mask_T)))
    assert tokens.explained_variance(returns_T + 3.0, returns_T).value == pytest.approx(1.0)
    assert tokens.explained_variance(torch.zeros_like(returns_T), returns_T).value == pytest.approx(0.0)
    assert tokens.explained_variance(-returns_T, returns_T).value == pytest.approx(-3.0)
    assert tokens.explained_variance(returns_T, torch.full_like(returns_T, 0.1)).value == 0.0


def test_token_batch_without_sampled_tokens_gives_zeros():
    tokens = make_token_batch([[completion([0, 0]), completion([0, 0, 0])]], [1.0, 2.0], {})
    zeros_T = torch.zeros(5)
    assert tokens.token_mean(zeros_T).value == tokens.explained_variance(zeros_T, zeros_T).value == 0.0
    assert tokens.lengths.tolist() == tokens.sequence_sums(zeros_T).tolist() == [0, 0]
    assert tokens.token_rewards().tolist() == [0.0] * 5
    assert tokens.with_advantages(torch.ones(5), {}).scalars["advantages"].tolist() == [0.0, 0.0]


def test_bits_do_not_depend_on_who_takes_which_groups():
    """All estimators; groups have many sizes and lengths, and begin at other places in each share."""
    rng = np.random.default_rng(7)
    groups = [
        [completion([0, *(rng.random(int(rng.integers(1, 299))) < 0.8)]) for _ in range(size)]
        for size in rng.integers(2, 6, 30)
    ]
    num_tokens = sum(trajectory.num_tokens for group in groups for trajectory in group)
    columns = {name: token_column(groups, rng.normal(size=num_tokens)) for name in NAMES}
    num_completions = len(keys_of(groups))
    scalars = {name: rng.normal(size=num_completions).tolist() for name in ("greedy_rewards", "costs")}
    section = KlRewardConfig(kind="k3", coefficient=0.1)
    both = ("advantages", "returns")
    cases = [
        (group_estimates, (GrpoConfig(kl_loss=None, kl_reward=section), 0.1), ()),
        (reinforce_estimates, (ReinforcePlusPlusConfig(gamma=0.9, kl_reward=section), 0.1), ("advantages",)),
        (reinforce_estimates, (ReinforcePlusPlusBaselineConfig(kl_loss=None), 0.0), ("advantages",)),
        (remax_estimates, (RemaxConfig(kl_reward=section), 0.1), ("advantages",)),
        (ppo_estimates, (PpoConfig(gamma=0.97, lam=0.8, whiten=True, kl_reward=section), 0.1), both),
        (vapo_estimates, (VapoConfig(gamma=0.97, length_alpha=0.05, kl_reward=section), 0.1), both),
        (monte_carlo_estimates, (VapoConfig(gamma=0.97), 0.0), ("returns",)),
        (safe_estimates, (SafeRlhfConfig(gamma=0.97, lam=0.8, whiten=True), 0.1, 1.7), (*both, "cost_returns")),
        (prime_estimates, (PrimeConfig(whiten=True),), ("advantages",)),
        (distillation_estimates, (), ("advantages",)),
    ]
    rewards = rng.normal(size=num_completions).tolist()
    for estimator, arguments, outputs in cases:
        turn_weights = (None, 0.5) if estimator in (group_estimates, reinforce_estimates) else (None,)
        for weight in turn_weights:
            wanted = ("advantages",) if weight else outputs
            job = make_job(estimator, arguments, groups, rewards, columns, wanted, scalars=scalars, turn_weight=weight)
            whole = estimate_here(job, groups)
            for num in (2, 7, 30):
                assert_same_bits(whole, estimate_here(job, groups, rng.permutation(30) % num))


@pytest.mark.parametrize("kind", [GrpoConfig, DrGrpoConfig, RlooConfig])
def test_estimates_of_rewards_have_the_same_bits_without_tokens(kind):
    rng = np.random.default_rng(5)
    groups = [[completion([0, 1]) for _ in range(size)] for size in rng.integers(2, 9, 40)]
    rewards = rng.normal(size=sum(map(len, groups))).tolist()
    job = make_job(group_estimates, (kind(kl_loss=None, kl_reward=None), 0.0), groups, rewards, {}, ())
    assert is_by_completions(group_estimates)
    found = estimate_completions(job)
    assert found.groups_N.tolist() == [g for g, _ in keys_of(groups)]
    for workers in (None, rng.permutation(40) % 3):
        assert_same_bits((found, {}), estimate_here(job, groups, workers))


def count_completions(tokens):
    return EstimatorOutput(metrics={"completions": len(tokens.rewards_N)})


def test_a_number_of_some_groups_is_no_metric_of_the_step():
    job = make_job(count_completions, (), GROUPS, REWARDS, {}, ())
    found, _ = estimate_here(job, GROUPS)
    assert found.metric_values == {"completions": N}
    with expect_error(ValueError, "'completions'", "by_groups"):
        estimate_here(job, GROUPS, [0, 1, 0])


def test_workers_take_what_they_generated_or_whole_parts_of_a_column():
    workers = [1, 0, 1]
    small = make_job(group_estimates, (), GROUPS, REWARDS, {}, ())
    assert share_groups(small, workers, 2).tolist() == [0, 0, 0]
    job = replace(small, num_tokens=TOKENS_PER_WORKER + 1)
    assert share_groups(job, workers, 2).tolist() == workers
    assert share_groups(job, [5, 0, 3], 6).tolist() == [1, 0, 1]
    parts = [np.array([key for key in KEYS if key[0] in groups]) for groups in ((0,), (2,), (1,))]
    column = ComputedColumn.of(["part a", "part b", "part c"], parts)
    with_column = replace(job, columns={"values": column})
    owners = share_groups(with_column, workers, 2)
    assert owners.tolist() == [0, 0, 1]
    assert [own.columns["values"].refs for own in with_column.split(owners).values()] == [
        ("part a", "part c"),
        ("part b",),
    ]
    unmarked = replace(with_column, estimator=count_completions)
    assert share_groups(unmarked, workers, 2).tolist() == [0, 0, 0]


def test_whitened_advantages_need_an_output():
    job = make_job(reinforce_estimates, (ReinforcePlusPlusConfig(kl_reward=None), 0.0), GROUPS, REWARDS, {}, ())
    with expect_error(ValueError, "outputs=('advantages',)"):
        estimate_here(job, GROUPS)
