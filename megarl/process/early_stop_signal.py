"""SIGUSR1: the time limit is near; a run ends in order after the step under way.

The signal stays blocked, and whoever wants to know looks whether it is pending: it interrupts nothing, a second one is
as good as the first, and none is lost while a process starts. What a process starts inherits the block. That matters
because SIGUSR1 kills a process that has made no arrangement, and some of those who send it do so to every process of a
job: Slurm to the tasks of a step with proctrack/cgroup, to all their descendants with proctrack/linuxproc.

A process that is not megarl's makes none: torchrun itself needs

    torchrun --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 600 ...

by which it passes the signal on to its ranks and gives them so many seconds to end.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNAL = signal.SIGUSR1


@contextmanager
def signal_held() -> Iterator[None]:
    """In the block, the signal only becomes pending, in this thread and whatever it starts: before anything else."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    # a launcher may have had it ignored, and then a pending one would be at the system's discretion
    handler = signal.signal(SIGNAL, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_asked():
            signal.sigwait({SIGNAL})
        signal.signal(SIGNAL, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_asked() -> bool:
    """Whether the signal has come, in `signal_held`."""
    return SIGNAL in signal.sigpending()
