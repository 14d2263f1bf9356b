"""Critic-free algorithms with a group baseline: GRPO, Dr.GRPO, RLOO, GSPO, CISPO, GMPO.

A group is the `group_size` completions of one prompt; the rewards of the group give the baseline of each of them.
"""

from __future__ import annotations

from megarl.config.algorithms.group_baseline import GroupPolicyConfig
from megarl.functional import group_advantages
from megarl.groups.estimation import EstimatorOutput, TokenBatch
from megarl.run.kl_penalty import reward_kl_penalty
from megarl.run.rl_run import RLRun


def train_grpo(run: RLRun, algorithm: GroupPolicyConfig) -> None:
    """Run the GRPO loop: sample groups, estimate advantages, train the policy, sync weights to the engines.

    Optimizer states, gradients and weights are offloaded during sampling, as configured by `trainer.offload`.
    """
    run.begin()
    for prompts in run.steps():
        batch = run.sample(prompts)
        run.add_reference_logprobs(batch)
        run.estimate(group_estimates, batch, algorithm, run.kl_coefficient)
        run.finish_step(batch, run.train_policy(batch))


def group_estimates(tokens: TokenBatch, algorithm: GroupPolicyConfig, kl_coefficient: float) -> EstimatorOutput:
    """Return one advantage per completion, computed from its reward and the rewards of its group.

    With `kl_reward`, the KL penalty against the reference policy is first subtracted from the reward.
    """
    penalty_T, metrics = reward_kl_penalty(tokens, algorithm, kl_coefficient)
    advantages_N = group_advantages(
        tokens.sequence_rewards(penalty_T), tokens.group_ids_N, kind=algorithm.group_baseline
    )
    return EstimatorOutput(scalars={"advantages": advantages_N}, metrics=metrics)
