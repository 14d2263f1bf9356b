"""Maps `algorithm.type` to the class of the algorithm."""

from __future__ import annotations

from typing import Any, cast

from megarl.algorithms.algorithm import Algorithm
from megarl.algorithms.distillation import Distillation
from megarl.algorithms.grpo import Cispo, Dapo, DrGrpo, Gmpo, Grpo, Gspo, Rloo
from megarl.algorithms.ppo import PfPpo, Ppo, SafeRlhf, Vapo
from megarl.algorithms.prime import Prime
from megarl.algorithms.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline, Remax
from megarl.config.algorithm import load_algorithm_class
from megarl.run.rl_run import RLRun

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


def train(run: RLRun) -> None:
    """Run the training loop of `algorithm.type`, from the first weight sync to the last step."""
    config = run.config.algorithm
    find_algorithm(config.type)().train(run, config)
