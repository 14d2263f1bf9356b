"""Which loop an algorithm runs."""

from __future__ import annotations

from megarl.algorithms.dapo import train_dapo
from megarl.algorithms.distillation import train_distillation
from megarl.algorithms.grpo import train_grouped
from megarl.algorithms.ppo import train_ppo
from megarl.algorithms.prime import train_prime
from megarl.algorithms.reinforce import train_reinforce_pp, train_remax
from megarl.algorithms.safe_rlhf import train_safe_rlhf
from megarl.algorithms.vapo import train_vapo
from megarl.config.algorithms.algorithm import (
    CispoConfig,
    DapoConfig,
    DistillationConfig,
    DrGrpoConfig,
    GmpoConfig,
    GrpoConfig,
    GspoConfig,
    PfPpoConfig,
    PpoConfig,
    PrimeConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
    RlooConfig,
    SafeRlhfConfig,
    VapoConfig,
)
from megarl.run.rl_run import PolicyRun


def train(run: PolicyRun) -> None:
    """From the first push to the last."""
    match run.config.algorithm:
        case DapoConfig() as algorithm:
            train_dapo(run, algorithm)
        case ReinforcePlusPlusConfig() | ReinforcePlusPlusBaselineConfig() as algorithm:
            train_reinforce_pp(run, algorithm)
        case GrpoConfig() | DrGrpoConfig() | RlooConfig() | GspoConfig() | CispoConfig() | GmpoConfig() as algorithm:
            train_grouped(run, algorithm)
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
