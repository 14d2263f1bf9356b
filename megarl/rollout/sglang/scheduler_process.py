"""The main function of SGLang's scheduler processes, tied to the process that hosts the engine.

A spawned process first unpickles its main function, and only then its arguments, which import SGLang for seconds. So
the tie is made in unpickling: from then on the process dies with its parent, and its output goes to a log file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

PR_SET_PDEATHSIG = 1


class SchedulerProcess:
    """Callable with the arguments of SGLang's `run_scheduler_process`."""

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir

    def __reduce__(self) -> tuple[Callable[[int, str], SchedulerProcess], tuple[int, str]]:
        return _enter, (os.getpid(), self.log_dir)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the scheduler until it fails; does not return."""
        from sglang.srt.managers.scheduler import run_scheduler_process

        from megarl.rollout.sglang.cpu_determinism import install_cpu_twins
        from megarl.rollout.sglang.cpu_mla import attend_to_latents_on_cpu

        install_cpu_twins()
        attend_to_latents_on_cpu()
        run_scheduler_process(*args, **kwargs)
        # SGLang swallows what ended the loop, and its open sockets may keep the process from exiting
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def log_file(log_dir: str, pid: int) -> Path:
    """Where the scheduler process `pid` writes its output."""
    return Path(log_dir) / f"scheduler-{pid}.log"


def ignore_sigquit() -> None:
    """SIGQUIT has no effect on this process from now on.

    A failing scheduler sends it to its parent. The host learns of the failure by the process's end, and lives on to
    tell. Through libc, because Python's `signal` works in main threads only.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGQUIT, int(signal.SIG_IGN))


def _enter(parent: int, log_dir: str) -> SchedulerProcess:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    log = os.open(log_file(log_dir, os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # a progress bar otherwise makes a lock for many processes, which stays in shared memory when this one is killed
    tqdm.set_lock(threading.RLock())
    return SchedulerProcess(log_dir)
