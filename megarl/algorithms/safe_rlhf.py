"""Safe RLHF: PPO with a reward critic and a cost critic, and a Lagrange multiplier that bounds the mean cost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import override

from megarl.algorithms.algorithm import Algorithm
from megarl.config.algorithms.actor_critic import SafeRlhfConfig
from megarl.functional import LagrangeMultiplier, gae, safe_rlhf_advantages
from megarl.groups.estimation.estimators import EstimatorOutput, TokenBatch, by_groups
from megarl.megatron.losses.policy import ClippedLoss
from megarl.run.kl_penalty import reward_kl_penalty
from megarl.run.rl_run import RLRun


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
