"""Proximal policy optimisation with a critic: PPO and PF-PPO."""

from __future__ import annotations

import torch

from megarl.config.algorithms.algorithm import ActorCriticConfig, PfPpoConfig, PpoConfig
from megarl.functional import gae, pf_ppo_resample, pf_ppo_weights, whiten
from megarl.groups.estimation import Estimates, StepTokens
from megarl.run.kl_penalty import penalty
from megarl.run.rl_run import PolicyRun
from megarl.run.rollout_batch import Experience


def train_ppo(run: PolicyRun, algorithm: PpoConfig | PfPpoConfig) -> None:
    """Values, advantages, then the critic and, once it is warm, the policy."""
    run.begin()
    for prompts in run.steps():
        batch = run.sample(prompts)
        run.add_reference(batch)
        run.add_values(batch)
        run.estimate(ppo_estimates, batch, algorithm, run.kl_coefficient, gives=("advantages", "returns"))
        if isinstance(algorithm, PfPpoConfig):
            draw_anew(batch, algorithm, seed=run.config.seed + run.step)
        run.train_critic(batch, algorithm.critic)
        warm = run.step > algorithm.critic.warmup_steps
        run.finish_step(batch, run.train_policy(batch) if warm else None)


def ppo_estimates(tokens: StepTokens, algorithm: ActorCriticConfig, kl_coefficient: float) -> Estimates:
    """Generalised advantages, and the returns that the critic learns."""
    penalty_T, metrics = penalty(tokens, algorithm, kl_coefficient)
    values_T = tokens.columns["values"]
    advantages_T, returns_T = gae(
        tokens.rewards(penalty_T),
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


def draw_anew(batch: Experience, algorithm: PfPpoConfig, *, seed: int) -> None:
    """Choose the completions to train on, by how far their rewards can be believed."""
    rewards_N, group_ids_N = torch.tensor(batch.rewards), torch.tensor(batch.group_ids)
    weights_N = pf_ppo_weights(rewards_N, group_ids_N, kind=algorithm.filter)
    generator = torch.Generator().manual_seed(seed)
    batch.picked = pf_ppo_resample(weights_N, group_ids_N, generator=generator).tolist()
