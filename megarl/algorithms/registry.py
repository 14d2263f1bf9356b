"""Maps `algorithm.type` to its training loop."""

from __future__ import annotations

from megarl.algorithms.dapo import train_dapo
from megarl.algorithms.distillation import train_distillation
from megarl.algorithms.grpo import train_grpo
from megarl.algorithms.ppo import train_ppo
from megarl.algorithms.prime import train_prime
from megarl.algorithms.reinforce import train_reinforce_pp, train_remax
from megarl.algorithms.safe_rlhf import train_safe_rlhf
from megarl.algorithms.vapo import train_vapo
from megarl.config.algorithms.actor_critic import PfPpoConfig, PpoConfig, SafeRlhfConfig, VapoConfig
from megarl.config.algorithms.group_baseline import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GmpoConfig,
    GrpoConfig,
    GspoConfig,
    RlooConfig,
)
from megarl.config.algorithms.model_advantages import DistillationConfig, PrimeConfig
from megarl.config.algorithms.reinforce_family import (
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
)
from megarl.run.rl_run import RLRun


def train(run: RLRun) -> None:
    """Run the training loop of `algorithm.type`, from the first weight sync to the last step."""
    match run.config.algorithm:
        case DapoConfig() as algorithm:
            train_dapo(run, algorithm)
        case ReinforcePlusPlusConfig() | ReinforcePlusPlusBaselineConfig() as algorithm:
            train_reinforce_pp(run, algorithm)
        case GrpoConfig() | DrGrpoConfig() | RlooConfig() | GspoConfig() | CispoConfig() | GmpoConfig() as algorithm:
            train_grpo(run, algorithm)
        case RemaxConfig() as algorithm:
            train_remax(run, algorithm)
        case PpoConfig() | PfPpoConfig() as algorithm:
            train_ppo(run, algorithm)
        case VapoConfig() as algorithm:
            train_vapo(run, algorithm)
        case SafeRlhfConfig() as algorithm:
            train_safe_rlhf(run, algorithm)
        case PrimeConfig() as algorithm:
            train_prime(run, algorithm)
        case DistillationConfig() as algorithm:
            train_distillation(run, algorithm)
