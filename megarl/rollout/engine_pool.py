"""The engines as one rollout worker uses them: which is free, which is lost, and which has come back.

group A   engine 0 ---- LostEngineError ---.
                                           '--> engine 1 (or engine 0, once it is back)   same request ids and seeds
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.errors import LostEngineError
from megarl.rollout.batching_engine import CoalescingEngine
from megarl.rollout.engine import GenerationEngine


@dataclass(slots=True, eq=False)
class Berth:
    """An engine and its load; one that comes back is another berth."""

    engine: CoalescingEngine
    outstanding: int = 0
    """Samples that it is working on for this worker."""


class Fleet:
    """All engines of a worker."""

    def __init__(self, engines: Sequence[GenerationEngine | None]) -> None:
        """Args:
        engines: None: it is not there yet; `replace` brings it.
        """
        self._berths: list[Berth | None] = [None if e is None else Berth(CoalescingEngine(e)) for e in engines]
        self._came_back = asyncio.Event()
        self._former: list[CoalescingEngine] = []
        """Lost ones, which may answer yet."""
        self.reassigned = 0
        """Samples that were begun anew because their engine was lost."""

    @property
    def outstanding(self) -> list[int]:
        """By engine, samples that it is working on."""
        return [0 if berth is None else berth.outstanding for berth in self._berths]

    @property
    def late_answers(self) -> int:
        """Completions that came after their engine was given up, or after their request had failed otherwise."""
        living = [berth.engine for berth in self._berths if berth is not None]
        return sum(engine.late_answers for engine in (*self._former, *living))

    def lose(self, index: int, error: LostEngineError) -> None:
        """Give an engine up: its requests go to others, and what it yet answers is dropped."""
        berth = self._berths[index]
        if berth is not None:
            berth.engine.lose(error)

    def replace(self, index: int, engine: GenerationEngine) -> None:
        """Have `engine` in the place of one that was lost."""
        self.lose(index, LostEngineError(f"engine {index} was replaced"))
        berth = self._berths[index]
        if berth is not None:
            self._former.append(berth.engine)
        self._berths[index] = Berth(CoalescingEngine(engine))
        self._came_back.set()

    async def freest(self) -> Berth:
        """The living engine with the fewest outstanding samples; waits until one lives."""
        while True:
            living = [berth for berth in self._berths if berth is not None and berth.engine.lost is None]
            if living:
                return min(living, key=lambda berth: berth.outstanding)
            self._came_back.clear()
            await self._came_back.wait()


class GroupBerth:
    """The one engine of a group's samples, where the prompt's keys and values are computed once."""

    def __init__(self, fleet: Fleet, num_samples: int) -> None:
        self._fleet, self._num_samples = fleet, num_samples
        self._berth: Berth | None = None
        self._moving = asyncio.Lock()

    async def engine(self) -> CoalescingEngine:
        """It, or another one where it is lost; waits until one lives, and otherwise returns at once."""
        async with self._moving:
            if self._berth is None or self._berth.engine.lost is not None:
                self.leave()
                self._berth = await self._fleet.freest()
                self._berth.outstanding += self._num_samples
            return self._berth.engine

    def leave(self) -> None:
        """The group needs none any more."""
        if self._berth is not None:
            self._berth.outstanding -= self._num_samples
        self._berth = None
