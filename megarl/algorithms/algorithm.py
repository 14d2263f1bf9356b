"""The interface of an algorithm: its configuration and its training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megarl.config.policy import PolicyConfig
from megarl.run.rl_run import RLRun


class Algorithm[C: PolicyConfig](ABC):
    """An RL algorithm. `algorithm.type` names a built-in one, or any class of this interface by import path.

    Examples:
            class Reinforce(rl.Algorithm[rl.GrpoConfig]):
                Config = rl.GrpoConfig

                def train(self, run: rl.RLRun, config: rl.GrpoConfig) -> None:
                    run.begin()
                    for prompts in run.steps():
                        batch = run.sample(prompts)
                        run.estimate(rl.group_estimates, batch, config, run.kl_coefficient)
                        run.finish_step(batch, run.train_policy(batch, rl.ClippedLoss.of(config)))
    """

    Config: type[C]
    """The section `algorithm`: a subclass of `PolicyConfig`, validated before anything starts. It also declares the
    auxiliary models (`models`) and what it needs of the rewards."""

    @abstractmethod
    def train(self, run: RLRun, config: C) -> None:
        """Run the training loop, from the first weight sync to the last step."""
