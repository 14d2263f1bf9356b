"""The interface of an algorithm: its configuration and its training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megarl.config.algorithms.policy import PolicyConfig
from megarl.run.rl_run import RLRun


class Algorithm[C: PolicyConfig](ABC):
    """An RL algorithm. `algorithm.type` names a built-in one, or any class of this interface by import path."""

    Config: type[C]
    """The section `algorithm`: a subclass of `PolicyConfig`, validated before anything starts. It also declares the
    auxiliary models (`models`) and what it needs of the rewards."""

    @abstractmethod
    def train(self, run: RLRun, config: C) -> None:
        """Run the training loop, from the first weight sync to the last step."""
