"""SIGUSR1 as early-stop request: the time limit is near, the run ends gracefully after the current step.

The signal stays blocked, and code that needs to know checks whether it is pending. So it interrupts nothing, repeated
signals have no further effect, and none is lost while a process starts. Child processes inherit the block. That matters
because SIGUSR1 kills a process without a handler, and some senders signal every process of a job: Slurm sends it to the
tasks of a step with proctrack/cgroup, and to all their descendants with proctrack/linuxproc.

Programs that are not part of megarl do not block it. torchrun needs

    torchrun --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 600 ...

to forward the signal to its ranks and to give them 600 seconds to end.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNAL = signal.SIGUSR1


@contextmanager
def stop_signal_blocked() -> Iterator[None]:
    """Block the signal in this thread and in what it starts, so that it only becomes pending; enter this first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    # a launcher may have set it to be ignored; POSIX leaves open whether an ignored signal becomes pending
    handler = signal.signal(SIGNAL, signal.SIG_DFL)
    try:
        yield
    finally:
        if stop_requested():
            signal.sigwait({SIGNAL})
        signal.signal(SIGNAL, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_requested() -> bool:
    """Return whether the signal has arrived; only valid inside `stop_signal_blocked`."""
    return SIGNAL in signal.sigpending()
