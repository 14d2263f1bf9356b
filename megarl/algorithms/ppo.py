"""Algorithms with a critic: PPO, PF-PPO, which resamples completions by reward, VAPO and Safe RLHF."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, override

import torch

from megarl.algorithms.algorithm import Algorithm
from megarl.config.algorithm import (
    ActorCriticConfig,
    PfPpoConfig,
    PpoConfig,
    SafeRlhfConfig,
    VapoConfig,
)
from megarl.functional import (
    LagrangeMultiplier,
    gae,
    length_adaptive_lambda,
    pf_ppo_resample,
    pf_ppo_weights,
    safe_rlhf_advantages,
)
from megarl.losses.policy_loss import ClippedLoss
from megarl.rollout.estimation.estimators import EstimatorOutput, TokenBatch, by_groups, reward_kl_penalty
from megarl.run.rl_run import RLRun
from megarl.run.rollout_batch import RolloutBatch


class SafeRlhf(Algorithm[SafeRlhfConfig]):
    """PPO with costs and a Lagrange multiplier."""

    Config = SafeRlhfConfig

    @override
    def train(self, run: RLRun, config: SafeRlhfConfig) -> None:
        """Run the PPO loop on the combined reward and cost advantages.

        Each step first updates the multiplier with the step's mean cost, then estimates with the new value.
        """
        run.begin()
        multiplier = run.register_state(
            "multiplier",
            LagrangeMultiplier(
                value=config.multiplier_start,
                lr=config.multiplier_lr,
                maximum=config.multiplier_max,
                limit=config.cost_limit,
            ),
        )
        for prompts in run.steps():
            batch = run.sample(prompts)
            costs = batch.reward_term(config.cost_term)
            if costs:
                multiplier.update(sum(costs) / len(costs))
                run.add_metrics({"safe_rlhf/multiplier": multiplier.value, "safe_rlhf/cost": sum(costs) / len(costs)})
            run.add_reference_logprobs(batch)
            run.add_values(batch)
            run.add_values(batch, critic="cost_critic", column="cost_values")
            batch.scalars["costs"] = costs
            outputs = ("advantages", "returns", "cost_returns")
            run.estimate(safe_estimates, batch, config, run.kl_coefficient, multiplier.value, outputs=outputs)
            run.train_critic(batch, config.critic)
            run.train_critic(
                batch, config.cost_critic, critic="cost_critic", values="cost_values", returns="cost_returns"
            )
            critic_is_warm = run.step > max(config.critic.warmup_steps, config.cost_critic.warmup_steps)
            run.finish_step(batch, run.train_policy(batch, ClippedLoss.of(config)) if critic_is_warm else None)


@by_groups
def safe_estimates(
    tokens: TokenBatch, algorithm: SafeRlhfConfig, kl_coefficient: float, multiplier: float
) -> EstimatorOutput:
    """Return the combined advantages of each token, and the returns that each critic is trained on.

    Half of the KL penalty is subtracted from the reward and half is added to the cost (PPO-Lagrangian of the paper).
    The scalar `costs` has the cost of each completion.
    """
    penalty_T, metrics = reward_kl_penalty(tokens, algorithm, kl_coefficient)
    half_T = None if penalty_T is None else penalty_T / 2
    cost_tokens = replace(tokens, rewards_N=tokens.scalars["costs"], turn_rewards_T=None)
    estimate = partial(
        gae, mask_T=tokens.mask_T, cu_seqlens_S=tokens.cu_seqlens_N, gamma=algorithm.gamma, lam=algorithm.lam
    )
    values_T, cost_values_T = tokens.columns["values"], tokens.columns["cost_values"]
    reward_adv_T, returns_T = estimate(tokens.token_rewards(half_T), values_T)
    costs_T = cost_tokens.token_rewards(None if half_T is None else -half_T)
    cost_adv_T, cost_returns_T = estimate(costs_T, cost_values_T)
    advantages_T = safe_rlhf_advantages(reward_adv_T, cost_adv_T, multiplier=multiplier)
    metrics |= {
        "critic/explained_variance": tokens.explained_variance(values_T, returns_T),
        "cost_critic/explained_variance": tokens.explained_variance(cost_values_T, cost_returns_T),
    }
    return tokens.with_advantages(
        advantages_T,
        metrics,
        whiten=algorithm.whiten,
        unbiased=algorithm.whiten_unbiased,
        returns=returns_T,
        cost_returns=cost_returns_T,
    )


EXPLAINED_VARIANCE = "critic/explained_variance"


class Vapo(Algorithm[VapoConfig]):
    """VAPO: PPO with a pretrained critic and a length-adaptive lambda."""

    Config = VapoConfig

    @override
    def train(self, run: RLRun, config: VapoConfig) -> None:
        """Pretrain the critic, then run the PPO loop.

        Policy and critic use different GAE lambdas; the policy loss adds the NLL of completions with a positive reward.
        """
        run.begin()
        if run.step == 0:  # not in a run that resumes from a later step
            pretrain_critic(run, config)
        for prompts in run.steps():
            batch = run.sample(prompts)
            run.add_reference_logprobs(batch)
            run.add_values(batch)
            run.estimate(vapo_estimates, batch, config, run.kl_coefficient, outputs=("advantages", "returns"))
            batch.scalars["positive"] = [float(reward > 0) for reward in batch.rewards]
            run.train_critic(batch, config.critic)
            critic_is_warm = run.step > config.critic.warmup_steps
            run.finish_step(
                batch,
                run.train_policy(batch, ClippedLoss.of(config), nll=config.nll_coefficient) if critic_is_warm else None,
            )


def pretrain_critic(run: RLRun, algorithm: VapoConfig) -> None:
    """Fit the critic to Monte-Carlo returns of the initial policy, until it converges or `max_steps` is reached."""
    monitor = ConvergenceMonitor()
    for number in range(1, algorithm.pretraining.max_steps + 1):
        if run.should_stop():
            break
        batch = run.sample(run.prompts(), attempt=number)
        if not batch.groups:  # the rewards of all completions failed
            run.finish_pretraining_step(number, {})
            continue
        run.add_reference_logprobs(batch)
        run.add_values(batch)
        run.estimate(monte_carlo_estimates, batch, algorithm, run.kl_coefficient, outputs=("returns",))
        run.train_critic(batch, algorithm.critic)
        run.finish_critics()
        loss, explained_variance = run.metric("critic/loss"), run.metric(EXPLAINED_VARIANCE)
        run.finish_pretraining_step(number, {"loss": loss, "explained_variance": explained_variance})
        if monitor.converged(loss, explained_variance):
            break


CONVERGENCE_WINDOW = 5
"""Number of steps over which the change of the value loss is measured."""

SETTLED_CHANGE = 0.02
"""Relative change of the value loss over the window below which it counts as converged."""

MIN_EXPLAINED_VARIANCE = 0.5
"""Explained variance of the returns that a critic needs before its pretraining ends early."""


@dataclass(slots=True)
class ConvergenceMonitor:
    """Detects convergence of critic pretraining from its loss and explained variance."""

    window: int = CONVERGENCE_WINDOW
    settled: float = SETTLED_CHANGE
    min_explained_variance: float = MIN_EXPLAINED_VARIANCE
    losses: list[float] = field(default_factory=list)

    def converged(self, loss: float, explained_variance: float) -> bool:
        """Record one step; return whether the critic has converged.

        Converged: the loss changed by less than the fraction `settled` over the last `window` steps, and the explained
        variance is at least `min_explained_variance`.
        """
        self.losses.append(loss)
        if len(self.losses) <= self.window or explained_variance < self.min_explained_variance:
            return False
        before = self.losses[-1 - self.window]
        return abs(before - loss) < self.settled * abs(before)


@by_groups
def monte_carlo_estimates(tokens: TokenBatch, algorithm: VapoConfig, kl_coefficient: float) -> EstimatorOutput:
    """Return the Monte-Carlo returns of each token (GAE with lambda 1), without advantages."""
    penalty_T, metrics = reward_kl_penalty(tokens, algorithm, kl_coefficient)
    values_T = tokens.columns["values"]
    _, returns_T = gae(
        tokens.token_rewards(penalty_T), values_T, tokens.mask_T, tokens.cu_seqlens_N, gamma=algorithm.gamma, lam=1.0
    )
    metrics |= {EXPLAINED_VARIANCE: tokens.explained_variance(values_T, returns_T)}
    return EstimatorOutput(columns={"returns": returns_T}, metrics=metrics)


@by_groups
def vapo_estimates(tokens: TokenBatch, algorithm: VapoConfig, kl_coefficient: float) -> EstimatorOutput:
    """Return the advantages of each token with the policy's lambda, and the returns with the critic's lambda.

    With `length_alpha`, the policy's lambda adapts to the completion length.
    """
    penalty_T, metrics = reward_kl_penalty(tokens, algorithm, kl_coefficient)
    rewards_T, values_T = tokens.token_rewards(penalty_T), tokens.columns["values"]
    gae_inputs = (rewards_T, values_T, tokens.mask_T, tokens.cu_seqlens_N)
    advantages_T, returns_T = gae(*gae_inputs, gamma=algorithm.gamma, lam=algorithm.lam)
    if algorithm.length_alpha is not None:
        lam_N = length_adaptive_lambda(tokens.lengths, alpha=algorithm.length_alpha)
        metrics["vapo/lambda"] = tokens.completion_mean(lam_N)
        advantages_T, _ = gae(*gae_inputs, gamma=algorithm.gamma, lam=lam_N)
    metrics |= {EXPLAINED_VARIANCE: tokens.explained_variance(values_T, returns_T)}
    return tokens.with_advantages(
        advantages_T, metrics, whiten=algorithm.whiten, unbiased=algorithm.whiten_unbiased, returns=returns_T
    )


C = TypeVar("C", bound=ActorCriticConfig)


class ActorCriticAlgorithm(Algorithm[C]):
    """The PPO loop: policy and critic."""

    def select_samples(self, run: RLRun, batch: RolloutBatch, config: C) -> None:
        """Choose the completions to train on; all of them by default."""

    @override
    def train(self, run: RLRun, config: C) -> None:
        """Run the loop: sample, compute values and GAE, train the critic and, after its warmup steps, the policy."""
        run.begin()
        for prompts in run.steps():
            batch = run.sample(prompts)
            run.add_reference_logprobs(batch)
            run.add_values(batch)
            run.estimate(ppo_estimates, batch, config, run.kl_coefficient, outputs=("advantages", "returns"))
            self.select_samples(run, batch, config)
            run.train_critic(batch, config.critic)
            critic_is_warm = run.step > config.critic.warmup_steps
            run.finish_step(batch, run.train_policy(batch, ClippedLoss.of(config)) if critic_is_warm else None)


class Ppo(ActorCriticAlgorithm[PpoConfig]):
    """PPO: clipped policy loss, with advantages from a critic by GAE."""

    Config = PpoConfig


class PfPpo(ActorCriticAlgorithm[PfPpoConfig]):
    """Policy-filtration PPO, which resamples completions by reward."""

    Config = PfPpoConfig

    @override
    def select_samples(self, run: RLRun, batch: RolloutBatch, config: PfPpoConfig) -> None:
        resample(batch, config, seed=run.config.seed + run.step)


@by_groups
def ppo_estimates(tokens: TokenBatch, algorithm: ActorCriticConfig, kl_coefficient: float) -> EstimatorOutput:
    """Return the GAE advantages of each token, and the returns that the critic is trained on.

    Examples:
        >>> tokens = TokenBatch(
        ...     mask_T=torch.tensor([False, True, True]),
        ...     cu_seqlens_N=torch.tensor([0, 3]),
        ...     rewards_N=torch.tensor([1.0]),
        ...     group_ids_N=torch.tensor([0]),
        ...     columns={"values": torch.tensor([0.0, 0.25, 0.5])},
        ... )
        >>> ppo_estimates(tokens, PpoConfig(kl_reward=None), 0.0).columns["returns"].tolist()
        [0.0, 1.0, 1.0]
    """
    penalty_T, metrics = reward_kl_penalty(tokens, algorithm, kl_coefficient)
    values_T = tokens.columns["values"]
    advantages_T, returns_T = gae(
        tokens.token_rewards(penalty_T),
        values_T,
        tokens.mask_T,
        tokens.cu_seqlens_N,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
    )
    metrics |= {"critic/explained_variance": tokens.explained_variance(values_T, returns_T)}
    return tokens.with_advantages(
        advantages_T, metrics, whiten=algorithm.whiten, unbiased=algorithm.whiten_unbiased, returns=returns_T
    )


def resample(batch: RolloutBatch, algorithm: PfPpoConfig, *, seed: int) -> None:
    """Set `batch.sample_indices` to completions drawn from each group, weighted by `algorithm.filter` (PF-PPO)."""
    rewards_N, group_ids_N = torch.tensor(batch.rewards), torch.tensor(batch.group_ids)
    weights_N = pf_ppo_weights(rewards_N, group_ids_N, kind=algorithm.filter)
    generator = torch.Generator().manual_seed(seed)
    batch.sample_indices = pf_ppo_resample(weights_N, group_ids_N, generator=generator).tolist()
