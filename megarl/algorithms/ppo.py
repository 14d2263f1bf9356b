"""PPO with a critic, and PF-PPO (policy filtration), which resamples completions by reward."""

from __future__ import annotations

from typing import TypeVar, override

import torch

from megarl.algorithms.algorithm import Algorithm
from megarl.config.algorithms.actor_critic import ActorCriticConfig, PfPpoConfig, PpoConfig
from megarl.functional import gae, pf_ppo_resample, pf_ppo_weights
from megarl.groups.estimation.estimators import EstimatorOutput, TokenBatch, by_groups
from megarl.megatron.losses.policy import ClippedLoss
from megarl.run.kl_penalty import reward_kl_penalty
from megarl.run.rl_run import RLRun
from megarl.run.rollout_batch import RolloutBatch

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
    """Return the GAE advantages of each token, and the returns that the critic is trained on."""
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
