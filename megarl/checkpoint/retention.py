from __future__ import annotations

from collections.abc import Iterable


def kept_steps(whole: Iterable[int], *, keep_last: int, keep_every: int) -> dict[int, str]:
    """Which of the steps with a whole checkpoint keep it, and the key of the configuration that says so.

    Args:
        keep_last: so many of the newest; at least 1.
        keep_every: and those of every so many steps; 0: no others.
    """
    assert keep_last >= 1, keep_last
    steps = sorted(whole)
    last = set(steps[-keep_last:])
    return {
        step: "keep_last" if step in last else "keep_every"
        for step in steps
        if step in last or (keep_every and step % keep_every == 0)
    }
