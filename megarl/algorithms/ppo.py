"""PPO with a critic, and PF-PPO (policy filtration), which resamples completions by reward."""

from __future__ import annotations

import torch

from megarl.config.algorithms.actor_critic import ActorCriticConfig, PfPpoConfig, PpoConfig
from megarl.functional import gae, pf_ppo_resample, pf_ppo_weights, whiten
from megarl.groups.estimation import EstimatorOutput, TokenBatch
from megarl.run.kl_penalty import reward_kl_penalty
from megarl.run.rl_run import RLRun
from megarl.run.rollout_batch import RolloutBatch


def train_ppo(run: RLRun, algorithm: PpoConfig | PfPpoConfig) -> None:
    """Run the PPO loop: sample, compute values and GAE, train the critic and, after its warmup steps, the policy."""
    run.begin()
    for prompts in run.steps():
        batch = run.sample(prompts)
        run.add_reference_logprobs(batch)
        run.add_values(batch)
        run.estimate(ppo_estimates, batch, algorithm, run.kl_coefficient, outputs=("advantages", "returns"))
        if isinstance(algorithm, PfPpoConfig):
            resample(batch, algorithm, seed=run.config.seed + run.step)
        run.train_critic(batch, algorithm.critic)
        critic_is_warm = run.step > algorithm.critic.warmup_steps
        run.finish_step(batch, run.train_policy(batch) if critic_is_warm else None)


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
    if algorithm.whiten:
        advantages_T = whiten(advantages_T, tokens.mask_T)
    metrics |= {"critic/explained_variance": tokens.explained_variance(values_T, returns_T)}
    return tokens.with_advantages(advantages_T, metrics, returns=returns_T)


def resample(batch: RolloutBatch, algorithm: PfPpoConfig, *, seed: int) -> None:
    """Set `batch.sample_indices` to completions drawn from each group, weighted by `algorithm.filter` (PF-PPO)."""
    rewards_N, group_ids_N = torch.tensor(batch.rewards), torch.tensor(batch.group_ids)
    weights_N = pf_ppo_weights(rewards_N, group_ids_N, kind=algorithm.filter)
    generator = torch.Generator().manual_seed(seed)
    batch.sample_indices = pf_ppo_resample(weights_N, group_ids_N, generator=generator).tolist()
