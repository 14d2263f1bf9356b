"""PRIME: an implicit process reward model, trained online from outcome rewards only."""

from __future__ import annotations

from functools import partial
from typing import override

from megarl.algorithms.algorithm import Algorithm
from megarl.algorithms.grpo import SAMPLED_REWARD
from megarl.config.algorithm import PrimeConfig
from megarl.functional import prime_rewards
from megarl.losses.policy_loss import ClippedLoss
from megarl.losses.supervised_loss import ImplicitPrmLoss
from megarl.rollout.estimation.estimators import EstimatorOutput, TokenBatch, by_groups
from megarl.run.remote.group_stream import FinishedGroup
from megarl.run.rl_run import RLRun


class Prime(Algorithm[PrimeConfig]):
    """Process reinforcement through implicit rewards."""

    Config = PrimeConfig

    @override
    def train(self, run: RLRun, config: PrimeConfig) -> None:
        """Run the PRIME loop: sample, drop too easy and too hard prompts, train the reward model, train the policy.

        The process rewards of a step come from the reward model after its update in this step.
        """
        run.begin()
        for prompts in run.steps():
            found = run.sample_kept(prompts, partial(has_useful_accuracy, config))
            batch = found.batch
            run.add_metrics({"prime/kept_groups": len(batch.groups)})
            rewards = [reward for sampled in found.sampled for reward in sampled.rewards]
            if rewards:
                run.add_metrics({SAMPLED_REWARD: sum(rewards) / len(rewards)})
            if not batch.groups:
                run.notify(f"step {run.step}: no group has an accuracy between min_accuracy and max_accuracy")
                run.finish_step(found.sampled[-1], None)
                continue
            run.add_reference_logprobs(batch)
            batch.scalars["outcomes"] = [float(reward > 0) for reward in batch.rewards]
            run.train_model(batch, "reward_model", ImplicitPrmLoss(beta=config.beta))
            run.add_model_logprobs(batch, "reward_model", "reward_logprobs", phase="process_rewards")
            run.estimate(prime_estimates, batch, config, outputs=("advantages",))
            run.finish_step(batch, run.train_policy(batch, ClippedLoss.of(config)))


def has_useful_accuracy(algorithm: PrimeConfig, group: FinishedGroup) -> bool:
    """Return whether the group's accuracy (share of completions with reward > 0) is within the configured limits."""
    rewards = [group.summary.trajectories[i].reward for i in group.summary.kept]
    accuracy = sum(reward > 0 for reward in rewards) / len(rewards)
    return algorithm.min_accuracy <= accuracy <= algorithm.max_accuracy


@by_groups
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
        scales_process=algorithm.scale_process,
    )
    process_T = algorithm.beta * (tokens.columns["reward_logprobs"] - tokens.columns["ref_logprobs"])
    return tokens.with_advantages(
        advantages_T,
        {"prime/process_reward": tokens.token_mean(process_T)},
        whiten=algorithm.whiten,
        unbiased=algorithm.whiten_unbiased,
    )
