"""Safe RLHF: two critics, and a multiplier that holds the mean cost at its limit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from megarl.config.algorithms.algorithm import SafeRlhfConfig
from megarl.functional import LagrangeMultiplier, gae, safe_rlhf_advantages, whiten
from megarl.groups.estimation import Estimates, StepTokens
from megarl.run.kl_penalty import penalty
from megarl.run.rl_run import PolicyRun


def train_safe_rlhf(run: PolicyRun, algorithm: SafeRlhfConfig) -> None:
    """As PPO, on what reward and cost weigh together; the multiplier moves first, by the step's mean cost."""
    run.begin()
    multiplier = run.carry(
        "multiplier",
        LagrangeMultiplier(
            value=algorithm.multiplier_start,
            lr=algorithm.multiplier_lr,
            maximum=algorithm.multiplier_max,
            limit=algorithm.cost_limit,
        ),
    )
    for prompts in run.steps():
        batch = run.sample(prompts)
        costs = batch.term(algorithm.cost_term)
        multiplier.update(sum(costs) / len(costs))
        run.note({"safe_rlhf/multiplier": multiplier.value, "safe_rlhf/cost": sum(costs) / len(costs)})
        run.add_reference(batch)
        run.add_values(batch)
        run.add_values(batch, critic="cost_critic", column="cost_values")
        run.estimate(
            safe_estimates,
            batch,
            algorithm,
            run.kl_coefficient,
            costs,
            multiplier.value,
            gives=("advantages", "returns", "cost_returns"),
        )
        run.train_critic(batch, algorithm.critic)
        run.train_critic(
            batch, algorithm.cost_critic, critic="cost_critic", values="cost_values", returns="cost_returns"
        )
        warm = run.step > max(algorithm.critic.warmup_steps, algorithm.cost_critic.warmup_steps)
        run.finish_step(batch, run.train_policy(batch) if warm else None)


def safe_estimates(
    tokens: StepTokens, algorithm: SafeRlhfConfig, kl_coefficient: float, costs: list[float], multiplier: float
) -> Estimates:
    """Advantages of both, weighed; returns of each for its critic.

    Half of the penalty is taken from the reward and half is added to the cost, as its PPO-Lagrangian does.
    """
    penalty_T, metrics = penalty(tokens, algorithm, kl_coefficient)
    half_T = None if penalty_T is None else penalty_T / 2
    of_costs = replace(tokens, rewards_N=torch.tensor(costs))
    estimate = partial(
        gae, mask_T=tokens.mask_T, cu_seqlens_S=tokens.cu_seqlens_N, gamma=algorithm.gamma, lam=algorithm.lam
    )
    values_T, cost_values_T = tokens.columns["values"], tokens.columns["cost_values"]
    reward_adv_T, returns_T = estimate(tokens.rewards(half_T), values_T)
    costs_T = of_costs.rewards(None if half_T is None else -half_T)
    cost_adv_T, cost_returns_T = estimate(costs_T, cost_values_T)
    advantages_T = safe_rlhf_advantages(reward_adv_T, cost_adv_T, multiplier=multiplier)
    if algorithm.whiten:
        advantages_T = whiten(advantages_T, tokens.mask_T)
    metrics |= {
        "critic/explained_variance": tokens.explained_variance(values_T, returns_T),
        "cost_critic/explained_variance": tokens.explained_variance(cost_values_T, cost_returns_T),
    }
    return tokens.with_advantages(advantages_T, metrics, returns=returns_T, cost_returns=cost_returns_T)
