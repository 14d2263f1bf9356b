"""Reinforcement-learning algorithms: one module per training loop, and the names that an algorithm is written with."""

from megarl.algorithms.algorithm import Algorithm
from megarl.algorithms.grpo import group_estimates, group_outputs
from megarl.algorithms.ppo import ppo_estimates
from megarl.batch.trajectory import Prompt
from megarl.config.algorithm import GroupPolicyConfig, GrpoConfig, PpoConfig
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
from megarl.losses.loss import Loss, LossBatch, LossOutput, TokenLoss, TokenScores, ValueHeadLoss
from megarl.losses.policy_loss import ClippedLoss
from megarl.rollout.estimation.estimators import CompletionBatch, EstimatorOutput, TokenBatch, by_completions, by_groups
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
