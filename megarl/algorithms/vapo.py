"""VAPO: PPO for long chains of thought, with a pretrained critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import override

from megarl.algorithms.algorithm import Algorithm
from megarl.config.algorithms.actor_critic import ValuePretrainingConfig, VapoConfig
from megarl.functional import gae, length_adaptive_lambda
from megarl.groups.estimation.estimators import EstimatorOutput, TokenBatch, by_groups
from megarl.megatron.losses.policy import ClippedLoss
from megarl.run.kl_penalty import reward_kl_penalty
from megarl.run.rl_run import RLRun

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
    monitor = ConvergenceMonitor(algorithm.pretraining)
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


@dataclass(slots=True)
class ConvergenceMonitor:
    """Detects convergence of critic pretraining from its loss and explained variance."""

    config: ValuePretrainingConfig
    losses: list[float] = field(default_factory=list)

    def converged(self, loss: float, explained_variance: float) -> bool:
        """Record one step; return whether the critic has converged.

        Converged: the loss changed by less than the fraction `settled` over the last `window` steps, and the explained
        variance is at least `min_explained_variance`.
        """
        self.losses.append(loss)
        if len(self.losses) <= self.config.window or explained_variance < self.config.min_explained_variance:
            return False
        before = self.losses[-1 - self.config.window]
        return abs(before - loss) < self.config.settled * abs(before)


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
