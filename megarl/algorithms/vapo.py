"""VAPO: PPO for long chains of thought, with a critic that is trained first."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.config.algorithms.algorithm import ValuePretrainingConfig, VapoConfig
from megarl.functional import gae, length_adaptive_lambda, whiten
from megarl.groups.estimation import Estimates, StepTokens
from megarl.run.kl_penalty import penalty
from megarl.run.rl_run import PolicyRun

EXPLAINED = "critic/explained_variance"


def train_vapo(run: PolicyRun, algorithm: VapoConfig) -> None:
    """Pretrain the critic; then two lambdas, and likelihood of what was right."""
    run.begin()
    if run.step == 0:  # and not in a run that goes on behind it
        pretrain_critic(run, algorithm)
    for prompts in run.steps():
        batch = run.sample(prompts)
        run.add_reference(batch)
        run.add_values(batch)
        run.estimate(vapo_estimates, batch, algorithm, run.kl_coefficient, gives=("advantages", "returns"))
        batch.scalars["positive"] = [float(reward > 0) for reward in batch.rewards]
        run.train_critic(batch, algorithm.critic)
        warm = run.step > algorithm.critic.warmup_steps
        run.finish_step(batch, run.train_policy(batch, nll=algorithm.nll_coefficient) if warm else None)


def pretrain_critic(run: PolicyRun, algorithm: VapoConfig) -> None:
    """Fit the critic to Monte-Carlo returns of the policy as it is, until it has settled."""
    settling = Settling(algorithm.pretraining)
    for number in range(1, algorithm.pretraining.max_steps + 1):
        if run.ends_early():
            break
        batch = run.sample(run.prompts(), attempt=number)
        run.add_reference(batch)
        run.add_values(batch)
        run.estimate(monte_carlo_estimates, batch, algorithm, run.kl_coefficient, gives=("returns",))
        run.train_critic(batch, algorithm.critic)
        run.finish_critics()
        loss, explained = run.noted("critic/loss"), run.noted(EXPLAINED)
        run.log_pretraining(number, {"loss": loss, "explained_variance": explained})
        if settling.has_settled(loss, explained):
            break


@dataclass(slots=True)
class Settling:
    """Watches the critic's loss and the variance that it explains."""

    config: ValuePretrainingConfig
    losses: list[float] = field(default_factory=list)

    def has_settled(self, loss: float, explained_variance: float) -> bool:
        """Whether it has, with one more step."""
        self.losses.append(loss)
        if len(self.losses) <= self.config.window or explained_variance < self.config.min_explained_variance:
            return False
        before = self.losses[-1 - self.config.window]
        return abs(before - loss) < self.config.settled * abs(before)


def monte_carlo_estimates(tokens: StepTokens, algorithm: VapoConfig, kl_coefficient: float) -> Estimates:
    """Discounted returns alone: lambda 1."""
    penalty_T, metrics = penalty(tokens, algorithm, kl_coefficient)
    values_T = tokens.columns["values"]
    _, returns_T = gae(
        tokens.rewards(penalty_T), values_T, tokens.mask_T, tokens.cu_seqlens_N, gamma=algorithm.gamma, lam=1.0
    )
    metrics |= {EXPLAINED: tokens.explained_variance(values_T, returns_T)}
    return Estimates(columns={"returns": returns_T}, metrics=metrics)


def vapo_estimates(tokens: StepTokens, algorithm: VapoConfig, kl_coefficient: float) -> Estimates:
    """Advantages by the policy's lambda, returns by the critic's."""
    penalty_T, metrics = penalty(tokens, algorithm, kl_coefficient)
    rewards_T, values_T = tokens.rewards(penalty_T), tokens.columns["values"]
    where = (rewards_T, values_T, tokens.mask_T, tokens.cu_seqlens_N)
    advantages_T, returns_T = gae(*where, gamma=algorithm.gamma, lam=algorithm.lam)
    if algorithm.length_alpha is not None:
        lam_N = length_adaptive_lambda(tokens.lengths, alpha=algorithm.length_alpha)
        metrics["vapo/lambda"] = float(lam_N.mean())
        advantages_T, _ = gae(*where, gamma=algorithm.gamma, lam=lam_N)
    if algorithm.whiten:
        advantages_T = whiten(advantages_T, tokens.mask_T)
    metrics |= {EXPLAINED: tokens.explained_variance(values_T, returns_T)}
    return tokens.with_advantages(advantages_T, metrics, returns=returns_T)
