"""What launchers tell this process: torchrun's world, and by SIGUSR1 that the run's time limit is near.

torchrun's world is read from environment variables. After SIGUSR1 the run ends gracefully, after the current step.

The signal stays blocked, and code that needs to know checks whether it is pending. So it interrupts nothing, repeated
signals have no further effect, and none is lost while a process starts. Child processes inherit the block. That matters
because SIGUSR1 kills a process without a handler, and some senders signal every process of a job: Slurm sends it to the
tasks of a step with proctrack/cgroup, and to all their descendants with proctrack/linuxproc.

Programs that are not part of megarl do not block it. torchrun needs

    torchrun --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 600 ...

to forward the signal to its ranks and to give them 600 seconds to end. `megarl --help` imports this module, so it
imports nothing heavy.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.errors import ConfigError, MegarlError

if TYPE_CHECKING:
    from megarl.config.placement import PlacementConfig


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


EARLY_STOP = signal.SIGUSR1
"""The signal with which launchers request an early stop."""


@contextmanager
def stop_signal_blocked() -> Iterator[None]:
    """Block the signal in this thread and in what it starts, so that it only becomes pending; enter this first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {EARLY_STOP})
    # a launcher may have set it to be ignored; POSIX leaves open whether an ignored signal becomes pending
    handler = signal.signal(EARLY_STOP, signal.SIG_DFL)
    try:
        yield
    finally:
        if stop_requested():
            signal.sigwait({EARLY_STOP})
        signal.signal(EARLY_STOP, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_requested() -> bool:
    """Return whether the signal has arrived; only valid inside `stop_signal_blocked`."""
    return EARLY_STOP in signal.sigpending()
