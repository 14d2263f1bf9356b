"""Who is killed when: decided by a seed and by what an undisturbed run was doing after which step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.chaos.watch import START, Span

STEPS_PER_KILL = 3
"""A kill costs the step that it falls into and the next, after which the run counts as recovered; one to spare."""

IN_RECOVERY = 0.1
"""Share of the kills that hit a run while it recovers from the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedKill:
    """One process to kill."""

    target: str
    draw: float
    """In [0, 1): which process of the target, where it has several."""
    after_step: int
    """0: before the first step has ended."""
    phase: str
    """What an undisturbed run was doing then."""
    offset: float
    """Seconds after the line of `after_step`."""
    recovery_share: float | None = None
    """In [0, 1): instead of all that, so far into the recovery from the kill before, by the time that recoveries take.
    None: once the run has recovered."""


def plan_kills(
    count: int, *, seed: int, targets: Sequence[str], timeline: Mapping[int, Sequence[Span]]
) -> list[PlannedKill]:
    """`count` kills in the order of their steps, spread over the run; targets take turns in random order.

    Args:
        timeline: of an undisturbed run, see `Watch.timeline`.
    """
    rng = random.Random(seed)
    deck = _deck(rng, targets)
    in_recovery = set(rng.sample(range(1, count), round(IN_RECOVERY * count))) if count > 1 else set()
    window = len(timeline) / (count - len(in_recovery))
    planned: list[PlannedKill] = []
    number = -1
    for index in range(count):
        number += index not in in_recovery
        step = int(number * window) + rng.randrange(max(1, int(window) - 1))
        span = _choose(rng, timeline[step])
        kill = PlannedKill(
            target=next(deck),
            draw=rng.random(),
            after_step=step,
            phase=span.phase,
            offset=span.begin + rng.random() * span.seconds,
            recovery_share=rng.random() if index in in_recovery else None,
        )
        planned.append(kill)
    return planned


def _choose(rng: random.Random, spans: Sequence[Span]) -> Span:
    """One of each phase's spans, phases being equally likely however long they are."""
    phases = sorted({span.phase for span in spans})
    if not phases:
        return Span(phase=START, begin=0.0, seconds=1.0)
    phase = rng.choice(phases)
    return rng.choice([span for span in spans if span.phase == phase])


def _deck(rng: random.Random, targets: Sequence[str]) -> Iterator[str]:
    while True:
        yield from rng.sample(targets, len(targets))
