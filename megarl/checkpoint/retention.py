"""Retention rules: which checkpoints of a run are kept."""

from __future__ import annotations

from collections.abc import Iterable


def select_kept_steps(candidates: Iterable[int], *, keep_last: int, keep_every: int) -> dict[int, str]:
    """Return the steps whose checkpoints are kept, each with the configuration key that keeps it.

    Args:
        candidates: steps to choose from, in any order.
        keep_last: number of latest steps to keep; at least 1.
        keep_every: also keep the multiples of this number of steps; 0: no others.
    """
    assert keep_last >= 1, keep_last
    steps = sorted(candidates)
    last = set(steps[-keep_last:])
    return {
        step: "keep_last" if step in last else "keep_every"
        for step in steps
        if step in last or (keep_every and step % keep_every == 0)
    }
