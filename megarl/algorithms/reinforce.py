"""Policy gradients with neither a critic nor a group: REINFORCE++ and ReMax."""

from __future__ import annotations

import torch

from megarl.config.algorithms.algorithm import ReinforcePlusPlusBaselineConfig, ReinforcePlusPlusConfig, RemaxConfig
from megarl.functional import (
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
)
from megarl.groups.estimation import Estimates, StepTokens
from megarl.run.kl_penalty import penalty
from megarl.run.rl_run import PolicyRun


def train_reinforce_pp(run: PolicyRun, algorithm: ReinforcePlusPlusConfig | ReinforcePlusPlusBaselineConfig) -> None:
    """Returns, whitened over the whole step."""
    run.begin()
    for prompts in run.steps():
        batch = run.sample(prompts)
        run.add_reference(batch)
        run.estimate(reinforce_estimates, batch, algorithm, run.kl_coefficient, gives=("advantages",))
        run.finish_step(batch, run.train_policy(batch))


def reinforce_estimates(
    tokens: StepTokens, algorithm: ReinforcePlusPlusConfig | ReinforcePlusPlusBaselineConfig, kl_coefficient: float
) -> Estimates:
    """An advantage a token."""
    penalty_T, metrics = penalty(tokens, algorithm, kl_coefficient)
    if isinstance(algorithm, ReinforcePlusPlusConfig):
        advantages_T = reinforce_pp_advantages(
            tokens.rewards(penalty_T), tokens.mask_T, tokens.cu_seqlens_N, gamma=algorithm.gamma
        )
    else:
        advantages_T = reinforce_pp_baseline_advantages(
            tokens.totals(penalty_T), tokens.group_ids_N, tokens.mask_T, tokens.cu_seqlens_N
        )
    return tokens.with_advantages(advantages_T, metrics)


def train_remax(run: PolicyRun, algorithm: RemaxConfig) -> None:
    """The reward of each prompt's greedy completion is the baseline of its others."""
    run.begin()
    for prompts in run.steps():
        greedy = run.sample(prompts, greedy=True)
        batch = run.sample(prompts)
        run.add_reference(batch)
        baselines = [greedy.rewards[group] for group in batch.group_ids]
        run.note({"remax/greedy_reward": sum(greedy.rewards) / len(greedy.rewards)})
        run.estimate(remax_estimates, batch, algorithm, run.kl_coefficient, baselines, gives=("advantages",))
        run.finish_step(batch, run.train_policy(batch))


def remax_estimates(
    tokens: StepTokens, algorithm: RemaxConfig, kl_coefficient: float, baselines: list[float]
) -> Estimates:
    """An advantage a token."""
    penalty_T, metrics = penalty(tokens, algorithm, kl_coefficient)
    advantages_T = remax_advantages(
        tokens.rewards(penalty_T), torch.tensor(baselines), tokens.mask_T, tokens.cu_seqlens_N
    )
    return tokens.with_advantages(advantages_T, metrics)
