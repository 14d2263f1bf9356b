"""The torchrun world of this process, read from its environment variables; imports no heavy modules."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megarl.config.placement import PlacementConfig
from megarl.errors import ConfigError, MegarlError

RANK0_GRACE_SECONDS = 10.0
"""How much longer rank 0 may take than another rank to find the same error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunWorld:
    """Ranks and sizes of this process in torchrun's world."""

    rank: int
    size: int
    local_rank: int
    """Rank among the processes of this node."""
    local_size: int
    """Number of torchrun's processes on this node."""

    @property
    def slots(self) -> tuple[int, int]:
        """Number of nodes and slots per node; (1, `size`) if the nodes have different numbers of ranks."""
        nodes, rest = divmod(self.size, self.local_size)
        return (1, self.size) if rest else (nodes, self.local_size)

    def check_placement(self, placement: PlacementConfig) -> None:
        """Check that the world has exactly one rank per slot of `placement`.

        Raises:
            ConfigError: it has more or fewer.
        """
        if placement.slots != self.size:
            raise ConfigError(
                f"placement: needs as many slots as torchrun has ranks, got nodes * slots_per_node = "
                f"{placement.nodes} * {placement.slots_per_node} = {placement.slots}, torchrun's world size = "
                f"{self.size} (without nodes and slots_per_node, the world decides)"
            )


def torchrun_world() -> TorchrunWorld | None:
    """Return this process's world, or None if torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    return TorchrunWorld(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


@contextmanager
def report_on_rank0(world: TorchrunWorld | None) -> Iterator[None]:
    """Report an error that all ranks find, before they have joined, only on rank 0; torchrun then ends the others.

    A rank that is still alive `RANK0_GRACE_SECONDS` after its error was the only one to fail, and raises the error.
    """
    try:
        yield
    except MegarlError as error:
        if world is None or world.rank == 0:
            raise
        code = error.exit_code
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(RANK0_GRACE_SECONDS)
        raise
