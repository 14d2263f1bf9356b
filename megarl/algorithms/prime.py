"""PRIME: an implicit process reward model, trained online from outcome rewards only."""

from __future__ import annotations

import torch

from megarl.algorithms.dapo import SAMPLED_REWARD
from megarl.config.algorithms.model_advantages import PrimeConfig
from megarl.functional import prime_rewards
from megarl.groups.estimation import EstimatorOutput, TokenBatch
from megarl.megatron.loss_specs import ImplicitPrmLoss
from megarl.run.rl_run import RLRun
from megarl.run.rollout_batch import RolloutBatch


def train_prime(run: RLRun, algorithm: PrimeConfig) -> None:
    """Run the PRIME loop: sample, drop too easy and too hard prompts, train the reward model, train the policy.

    The process rewards of a step come from the reward model after its update in this step.
    """
    run.begin()
    reward_model = run.models.trained["reward_model"]
    for prompts in run.steps():
        sampled = run.sample(prompts)
        batch = filter_by_accuracy(sampled, algorithm)
        run.add_metrics(
            {"prime/kept_groups": len(batch.groups), SAMPLED_REWARD: sum(sampled.rewards) / len(sampled.rewards)}
        )
        if not batch.groups:
            run.notify(f"step {run.step}: no group has an accuracy between min_accuracy and max_accuracy")
            run.finish_step(sampled, None)
            continue
        run.add_reference_logprobs(batch)
        batch.scalars["outcomes"] = [float(reward > 0) for reward in batch.rewards]
        request = batch.train_request(
            run.config,
            ImplicitPrmLoss(beta=algorithm.beta),
            {"ref_logprobs": "ref_logprobs", "outcomes": "outcomes"},
        )
        with run.phase("train_reward_model"):
            stats = reward_model.train_step(run.with_update_guard(request, "reward_model"))
        run.add_metrics({f"reward_model/{name}": value for name, value in stats.metrics.items()})
        with run.phase("process_rewards"):
            batch.columns["reward_logprobs"] = reward_model.logprobs(batch.forward_request(run.config))
        run.estimate(prime_estimates, batch, algorithm, outputs=("advantages",))
        run.finish_step(batch, run.train_policy(batch))


def filter_by_accuracy(batch: RolloutBatch, algorithm: PrimeConfig) -> RolloutBatch:
    """Return the groups whose accuracy (share of completions with reward > 0) is within the configured limits."""
    kept = []
    for group in batch.groups:
        rewards = [summary.reward for summary in group.summary.trajectories]
        accuracy = sum(reward > 0 for reward in rewards) / len(rewards)
        if algorithm.min_accuracy <= accuracy <= algorithm.max_accuracy:
            kept.append(group)
    return RolloutBatch(groups=kept)


def prime_estimates(tokens: TokenBatch, algorithm: PrimeConfig) -> EstimatorOutput:
    """Return the PRIME advantages of each token: process and outcome rewards, each with a leave-one-out baseline."""
    advantages_T = prime_rewards(
        tokens.columns["reward_logprobs"],
        tokens.columns["ref_logprobs"],
        tokens.rewards_N,
        tokens.group_ids_N,
        tokens.mask_T,
        tokens.cu_seqlens_N,
        beta=algorithm.beta,
        process_coefficient=algorithm.process_coefficient,
        outcome_coefficient=algorithm.outcome_coefficient,
    )
    process_T = algorithm.beta * (tokens.columns["reward_logprobs"] - tokens.columns["ref_logprobs"])
    return tokens.with_advantages(
        torch.as_tensor(advantages_T), {"prime/process_reward": tokens.masked_mean(process_T)}
    )
