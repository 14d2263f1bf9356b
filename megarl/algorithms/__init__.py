"""Reinforcement-learning algorithms: one module per training loop, and the names that an algorithm is written with.

`BUILT_IN` has the built-in ones; `algorithm.type` names one of them, or a class by import path.
"""

from __future__ import annotations

from typing import Any, cast

from megarl.algorithms.algorithm import Algorithm
from megarl.algorithms.grpo import Cispo, Dapo, DrGrpo, Gmpo, Grpo, Gspo, Rloo, group_estimates, group_outputs
from megarl.algorithms.ppo import PfPpo, Ppo, SafeRlhf, Vapo, ppo_estimates
from megarl.algorithms.prime import Prime
from megarl.algorithms.reinforce import Distillation, ReinforcePlusPlus, ReinforcePlusPlusBaseline, Remax
from megarl.batch.trajectory import Prompt
from megarl.config.algorithm import GroupPolicyConfig, GrpoConfig, PpoConfig, load_algorithm_class
from megarl.config.policy import (
    ClippedPolicyConfig,
    CriticConfig,
    FrozenModelConfig,
    ModelUse,
    PolicyConfig,
    TrainedModelConfig,
)
from megarl.data.tokenizer import load_tokenizer
from megarl.functional import PolicyLossOutput
from megarl.losses import ClippedLoss, Loss, LossBatch, LossOutput, TokenLoss, TokenScores, ValueHeadLoss
from megarl.rollout.estimators import CompletionBatch, EstimatorOutput, TokenBatch, by_completions, by_groups
from megarl.run.rl_run import RLRun
from megarl.run.rollout_batch import RolloutBatch

__all__ = [
    "Algorithm",
    "ClippedLoss",
    "ClippedPolicyConfig",
    "CompletionBatch",
    "CriticConfig",
    "EstimatorOutput",
    "FrozenModelConfig",
    "GroupPolicyConfig",
    "GrpoConfig",
    "Loss",
    "LossBatch",
    "LossOutput",
    "ModelUse",
    "PolicyConfig",
    "PolicyLossOutput",
    "PpoConfig",
    "Prompt",
    "RLRun",
    "RolloutBatch",
    "TokenBatch",
    "TokenLoss",
    "TokenScores",
    "TrainedModelConfig",
    "ValueHeadLoss",
    "by_completions",
    "by_groups",
    "group_estimates",
    "group_outputs",
    "load_tokenizer",
    "ppo_estimates",
]


BUILT_IN: tuple[type[Algorithm[Any]], ...] = (
    Grpo,
    DrGrpo,
    Rloo,
    Gspo,
    Cispo,
    Gmpo,
    Dapo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Remax,
    Ppo,
    PfPpo,
    Vapo,
    SafeRlhf,
    Prime,
    Distillation,
)


def find_algorithm(kind: str) -> type[Algorithm[Any]]:
    """Return the algorithm class of `algorithm.type`: a built-in one, or one named by import path."""
    if ":" in kind:
        return cast("type[Algorithm[Any]]", load_algorithm_class(kind))
    return next(found for found in BUILT_IN if found.Config.model_fields["type"].default == kind)
