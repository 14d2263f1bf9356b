"""The main function of SGLang's scheduler processes, which die with the process that hosts the engine.

A spawned process unpickles its main function first, and then its arguments, which import SGLang and take seconds.
Therefore the unpickling of the main function sets the parent-death signal and redirects the output to a log file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

from megarl.process.prctl import set_parent_death_signal


class SchedulerProcess:
    """Main function of a scheduler process; takes the arguments of SGLang's `run_scheduler_process`."""

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir

    def __reduce__(self) -> tuple[Callable[[int, str], SchedulerProcess], tuple[int, str]]:
        return _enter_scheduler_process, (os.getpid(), self.log_dir)

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Run the scheduler until it fails; does not return."""
        from sglang.srt.managers.scheduler import run_scheduler_process

        from megarl.rollout.sglang.cpu_determinism import install_cpu_kernels
        from megarl.rollout.sglang.cpu_mla import use_absorbed_mla_on_cpu

        install_cpu_kernels()
        use_absorbed_mla_on_cpu()
        run_scheduler_process(*args, **kwargs)
        # SGLang swallows the exception that ended the loop, and its open sockets may keep the process from exiting
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def log_file(log_dir: str, pid: int) -> Path:
    """Return the path of the log file of scheduler process `pid`."""
    return Path(log_dir) / f"scheduler-{pid}.log"


def ignore_sigquit() -> None:
    """Make this process ignore SIGQUIT.

    A failing scheduler sends SIGQUIT to its parent. The host must survive to report the failure, which it detects by
    the scheduler's exit. Uses libc, because Python's `signal` works in the main thread only.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGQUIT, int(signal.SIG_IGN))


def _enter_scheduler_process(parent: int, log_dir: str) -> SchedulerProcess:
    set_parent_death_signal(signal.SIGKILL, parent=parent)
    log = os.open(log_file(log_dir, os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # a progress bar otherwise creates a multiprocessing lock, which stays in shared memory if this process is killed
    tqdm.set_lock(threading.RLock())
    return SchedulerProcess(log_dir)
