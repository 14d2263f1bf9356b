"""The world that torchrun has put this process in, from its environment alone: imports nothing heavy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megarl.config.placement import PlacementConfig
from megarl.errors import ConfigError, MegarlError

PATIENCE_SECONDS = 10.0
"""How long rank 0 may take longer than another rank to come upon the same mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunWorld:
    """This process's place among torchrun's."""

    rank: int
    size: int
    local_rank: int
    """On this machine."""
    local_size: int

    @property
    def slots(self) -> tuple[int, int]:
        """Nodes, and slots of each; machines that differ count as one."""
        nodes, rest = divmod(self.size, self.local_size)
        return (1, self.size) if rest else (nodes, self.local_size)

    def require(self, placement: PlacementConfig) -> None:
        """Return if the world has a rank for every slot, and no more.

        Raises:
            ConfigError: it has not.
        """
        if placement.slots != self.size:
            raise ConfigError(
                f"placement: needs as many slots as torchrun has ranks, got nodes * slots_per_node = "
                f"{placement.nodes} * {placement.slots_per_node} = {placement.slots}, torchrun's world size = "
                f"{self.size} (without nodes and slots_per_node, the world decides)"
            )


def torchrun_world() -> TorchrunWorld | None:
    """None where this process was not started by torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    return TorchrunWorld(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


@contextmanager
def said_once(world: TorchrunWorld | None) -> Iterator[None]:
    """For a block that fails on every rank alike, before they have joined: rank 0 says why, and torchrun ends the rest.

    A rank that is not ended for `PATIENCE_SECONDS` after its error was alone with it, and raises it after all.
    """
    try:
        yield
    except MegarlError as error:
        if world is None or world.rank == 0:
            raise
        code = error.exit_code
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(PATIENCE_SECONDS)
        raise
