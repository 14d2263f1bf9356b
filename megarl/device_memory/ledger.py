"""A ledger of one GPU's memory: bytes by process and owner, and the moment of the highest total in each phase.

    ledger = DeviceLedger()
    with ledger.phase("training"):
        ledger.allocate("trainer", "activations", 2**30)
        ledger.free("trainer", "activations")
    ledger.peaks["training"].total    what the trainer held before, and 2**30

It stands in for a device: nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from megarl.device_memory.gpus import GIB

LABELS = {"kv_cache": "KV cache"}
"""Owner -> its name in messages, where that is another."""

Account = tuple[str, str]
"""Process and owner of an allocation, such as `("trainer", "gradients")`."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Bytes by account at one moment."""

    by_account: Mapping[Account, int]

    @property
    def total(self) -> int:
        """Bytes of all accounts together."""
        return sum(self.by_account.values())

    def arithmetic(self) -> str:
        """Return the accounts with their GiB, largest first, and their sum; without those below 0.05 GiB."""
        parts = sorted(self.by_account.items(), key=lambda item: -item[1])
        named = (
            f"{process} {LABELS.get(owner, owner)} {size / GIB:.1f}"
            for (process, owner), size in parts
            if size >= GIB / 20
        )
        return f"{' + '.join(named)} = {self.total / GIB:.1f} GiB"


class DeviceLedger:
    """Memory of one device: what processes hold now, and what they held at the peak and at the end of each phase."""

    def __init__(self) -> None:
        self._held: dict[Account, int] = {}
        self._phase: str | None = None
        self.peaks: dict[str, Holdings] = {}
        """Phase -> holdings when their total was highest, over all times that the phase was entered."""
        self.ends: dict[str, Holdings] = {}
        """Phase -> holdings when it ended last."""

    @property
    def now(self) -> Holdings:
        """What processes hold now."""
        return Holdings(dict(self._held))

    def holds(self, process: str, owner: str) -> bool:
        """Return whether the account has an allocation, of any size."""
        return (process, owner) in self._held

    def allocate(self, process: str, owner: str, num_bytes: int) -> None:
        """Record an allocation. An account has one at a time."""
        assert (process, owner) not in self._held, f"{process} holds {owner} already"
        assert num_bytes >= 0, (process, owner, num_bytes)
        self._held[process, owner] = num_bytes
        self._record_peak()

    def free(self, process: str, owner: str) -> int:
        """Record that the account's allocation is freed, and return its bytes."""
        return self._held.pop((process, owner))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute what happens within to phase `name`.

        What is freed before the first allocation of a phase does not count to its peak.
        """
        assert self._phase is None, f"{name} within {self._phase}"
        self._phase = name
        yield
        self._record_peak()
        self.ends[name], self._phase = self.now, None

    def _record_peak(self) -> None:
        if self._phase is None:
            return
        if self._phase not in self.peaks or sum(self._held.values()) > self.peaks[self._phase].total:
            self.peaks[self._phase] = self.now
