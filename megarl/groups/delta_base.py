"""The controller's record of the sync that engines and trainer ranks have in common, on which a delta sync builds.

    sync 7   whole   engines 0, 1     base of both: 7
    sync 8   delta   engines 0, 1     base of both: 8
    sync 9   whole   engine 1         it was restarted; base of engine 1: 9, of engine 0: 8
    sync 10  whole   engines 0, 1     the trainer ranks have the digests of sync 9, engine 0 has not received it

Trainer ranks keep digests of the latest sync only, over connections that they have not made again since. A failed sync
leaves no base. All other engines and runs have none either: the sync is whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.groups.engine_group import StartedEngine
from megarl.reshard.planning.strategy import DeltaUpdate


class DeltaBase:
    """The latest sync that has succeeded, and the engines that serve its weights."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._engines: list[StartedEngine] = []
        self._generation = -1

    def update(self, number: int, engines: Sequence[StartedEngine], generation: int) -> DeltaUpdate:
        """Return what sync `number` may leave out.

        Args:
            engines: the engines that take part.
            generation: of the trainer ranks' connections.
        """
        is_base = generation == self._generation and all(engine in self._engines for engine in engines)
        return DeltaUpdate(number=number, base=self._number if is_base else None)

    def record(self, update: DeltaUpdate, engines: Sequence[StartedEngine], generation: int) -> None:
        """Record that a sync has succeeded."""
        self._number, self._engines, self._generation = update.number, list(engines), generation

    def clear(self) -> None:
        """Record that a sync begins: if it fails, there is no base."""
        self._number, self._engines = None, []
