"""Plans which processes are killed and when, from a seed and the timeline of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.chaos.watch import START, Span

STEPS_PER_KILL = 3
"""A kill affects its step and the next one, after which the run counts as recovered; one step of margin."""

IN_RECOVERY = 0.1
"""Fraction of the kills that hit a run while it recovers from the previous one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedKill:
    """A process to kill, and when."""

    target: str
    draw: float
    """In [0, 1): selects one of the processes of the target."""
    after_step: int
    """Number of finished steps after which to kill; 0: before the end of the first step."""
    phase: str
    """Phase of the undisturbed run at that time."""
    offset: float
    """Seconds after the end of `after_step`."""
    recovery_share: float | None = None
    """In [0, 1): fraction of the typical recovery time after which to kill during the recovery from the previous kill,
    regardless of `after_step` and `offset`. None: wait until the run has recovered."""


def plan_kills(
    count: int, *, seed: int, targets: Sequence[str], timeline: Mapping[int, Sequence[Span]]
) -> list[PlannedKill]:
    """Return `count` kills in order of their steps, spread over the run; each target once per random permutation.

    Args:
        timeline: timeline of an undisturbed run, as returned by `RunWatcher.timeline`.
    """
    rng = random.Random(seed)
    targets_in_turn = _cycle_targets(rng, targets)
    in_recovery = set(rng.sample(range(1, count), round(IN_RECOVERY * count))) if count > 1 else set()
    window = len(timeline) / (count - len(in_recovery))
    planned: list[PlannedKill] = []
    number = -1
    for index in range(count):
        number += index not in in_recovery
        step = int(number * window) + rng.randrange(max(1, int(window) - 1))
        span = _choose_span(rng, timeline[step])
        kill = PlannedKill(
            target=next(targets_in_turn),
            draw=rng.random(),
            after_step=step,
            phase=span.phase,
            offset=span.begin + rng.random() * span.seconds,
            recovery_share=rng.random() if index in in_recovery else None,
        )
        planned.append(kill)
    return planned


def _choose_span(rng: random.Random, spans: Sequence[Span]) -> Span:
    """Draw a phase uniformly, whatever its duration, then one of its spans."""
    phases = sorted({span.phase for span in spans})
    if not phases:
        return Span(phase=START, begin=0.0, seconds=1.0)
    phase = rng.choice(phases)
    return rng.choice([span for span in spans if span.phase == phase])


def _cycle_targets(rng: random.Random, targets: Sequence[str]) -> Iterator[str]:
    while True:
        yield from rng.sample(targets, len(targets))
