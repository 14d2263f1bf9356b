"""Completion lengths with a tail, and the sizes of the simulated runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import erf, log, sqrt

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Log-normal lengths with mean 1, cut at a multiple of it, on a number of slots of the engines."""

    sigma: float
    """Standard deviation of the logarithm."""
    longest: float
    """Longest length as a multiple of the mean before cutting."""
    slots: float
    """Number of samples that are generated at once, as a share of the samples of a step."""

    def lengths(self, num_groups: int, group_size: int, seed: int) -> npt.NDArray[np.float64]:
        """Return the lengths [num_groups, group_size], whose distribution has mean 1."""
        rng = np.random.default_rng(seed)
        lengths = rng.lognormal(-(self.sigma**2) / 2, self.sigma, (num_groups, group_size)).clip(max=self.longest)
        return lengths / self._cut_mean()

    def _cut_mean(self) -> float:
        """Return the mean of the lengths after cutting: E[min(X, longest)]."""
        z = (log(self.longest) + self.sigma**2 / 2) / self.sigma
        return _normal_cdf(z - self.sigma) + self.longest * (1 - _normal_cdf(z))


def _normal_cdf(x: float) -> float:
    return 0.5 * (1 + erf(x / sqrt(2)))


TAILS: Mapping[str, Tail] = {
    "moderate": Tail(sigma=0.8, longest=5, slots=0.5),
    "heavy": Tail(sigma=1.0, longest=20, slots=0.5),
    "heavy, 1/4 slots": Tail(sigma=1.0, longest=20, slots=0.25),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A run whose generation of a step takes the time 1 with all slots busy."""

    tail: Tail
    groups_per_step: int = 32
    group_size: int = 8
    num_steps: int = 200
    train_seconds: float = 1.0
    """Time of one training step."""
    pause_seconds: float = 0.02
    """Time of one push, in which neither engines nor trainer work."""
    seed: int = 0

    @property
    def num_slots(self) -> int:
        """Number of samples that the engines generate at once."""
        return round(self.tail.slots * self.groups_per_step * self.group_size)

    @property
    def seconds_per_length(self) -> float:
        """Time to generate a sample of length 1: a step's samples take 1 with all slots busy."""
        return self.num_slots / (self.groups_per_step * self.group_size)

    def lengths(self) -> npt.NDArray[np.float64]:
        """Return the lengths of all groups that a run may need, [groups, group_size]."""
        return self.tail.lengths(2 * (self.num_steps + 20) * self.groups_per_step, self.group_size, self.seed)

    @property
    def bound(self) -> float:
        """Shortest possible time of a step: the larger of generation and training."""
        return max(1.0, self.train_seconds)
