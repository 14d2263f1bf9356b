"""The reward of the workloads: whether the first sampled token is odd, which both trainers compute from the ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.batch.trajectory import Trajectory


def score(trajectories: Sequence[Trajectory], texts: Sequence[str], row: Mapping[str, str]) -> list[float]:
    """Return 1.0 for each completion that begins with an odd token id, and 0.0 for the others."""
    return [float(trajectory.token_ids[trajectory.loss_mask][0] % 2) for trajectory in trajectories]
