"""PRIME: a process reward model that learns from outcomes alone, while the policy learns from it."""

from __future__ import annotations

import torch

from megarl.algorithms.dapo import SAMPLED
from megarl.config.algorithms.algorithm import PrimeConfig
from megarl.functional import prime_rewards
from megarl.groups.estimation import Estimates, StepTokens
from megarl.megatron.requests import ImplicitRewardLoss
from megarl.run.rl_run import PolicyRun
from megarl.run.rollout_batch import Experience


def train_prime(run: PolicyRun, algorithm: PrimeConfig) -> None:
    """Prompts that are neither too easy nor too hard; the reward model first, then what it says, then the policy."""
    run.begin()
    reward_model = run.models.trained["reward_model"]
    for prompts in run.steps():
        sampled = run.sample(prompts)
        batch = within_reach(sampled, algorithm)
        run.note({"prime/kept_groups": len(batch.groups), SAMPLED: sum(sampled.rewards) / len(sampled.rewards)})
        if not batch.groups:
            run.say(f"step {run.step}: no prompt is right between min_accuracy and max_accuracy of the time")
            run.finish_step(sampled, None)
            continue
        run.add_reference(batch)
        batch.scalars["outcomes"] = [float(reward > 0) for reward in batch.rewards]
        work = batch.train_work(
            run.config,
            ImplicitRewardLoss(beta=algorithm.beta),
            {"ref_logprobs": "ref_logprobs", "outcomes": "outcomes"},
        )
        with run.phase("train_reward_model"):
            stats = reward_model.train_step(run.guarded(work, "reward_model"))
        run.note({f"reward_model/{name}": value for name, value in stats.metrics.items()})
        with run.phase("process_rewards"):
            batch.columns["reward_logprobs"] = reward_model.logprobs(batch.evaluation_work(run.config))
        run.estimate(prime_estimates, batch, algorithm, gives=("advantages",))
        run.finish_step(batch, run.train_policy(batch))


def within_reach(batch: Experience, algorithm: PrimeConfig) -> Experience:
    """The groups whose share of right completions is between the limits."""
    kept = []
    for group in batch.groups:
        rewards = [summary.reward for summary in group.summary.trajectories]
        share = sum(reward > 0 for reward in rewards) / len(rewards)
        if algorithm.min_accuracy <= share <= algorithm.max_accuracy:
            kept.append(group)
    return Experience(groups=kept)


def prime_estimates(tokens: StepTokens, algorithm: PrimeConfig) -> Estimates:
    """Process and outcome rewards against the group's."""
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
    return tokens.with_advantages(torch.as_tensor(advantages_T), {"prime/process_reward": tokens.mean(process_T)})
