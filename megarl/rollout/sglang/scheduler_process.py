"""The main function of SGLang's scheduler processes, which die with the process that hosts the engine.

A spawned process unpickles its main function first, and then its arguments, which import SGLang and take seconds.
Therefore the unpickling of the main function sets the parent-death signal and redirects the output to a log file.
A CPU engine forks its schedulers from a server process that has imported SGLang (`fork_server`).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from megarl.process.prctl import set_parent_death_signal
from megarl.rollout.sglang.start_gate import wait_at_gate

FORK_SERVER_MODULES = ["megarl.rollout.sglang.fork_server"]
"""Modules that multiprocessing imports in the server."""

HOST_VARIABLE = "MEGARL_ENGINE_HOST"
"""Environment variable of the server: process id of the engine's host."""

_fork_server: int | None = None
"""Process id of the server, in the server and in the processes forked from it."""


def start_fork_server(folder: str) -> bool:
    """Start the server process from which schedulers are forked, and return while it imports SGLang.

    Its socket is in `folder`: multiprocessing would put it into a folder that remains if this process is killed.

    Returns:
        False if the server was already running, started for another engine of this process.
    """
    server: Any = forkserver._forkserver
    previous = server._forkserver_pid
    multiprocessing.set_forkserver_preload(FORK_SERVER_MODULES)
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    temporary_folder = settings.get("tempdir")
    # Ray extends sys.path, of which the server knows nothing
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), HOST_VARIABLE: str(os.getpid())}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    settings["tempdir"] = folder
    try:
        forkserver.ensure_running()
    finally:
        settings["tempdir"] = temporary_folder
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return bool(server._forkserver_pid != previous)


def stop_fork_server() -> None:
    """Kill the server process; its schedulers must have ended."""
    server: Any = forkserver._forkserver
    os.kill(server._forkserver_pid, signal.SIGKILL)  # it may still be importing
    with suppress(FileNotFoundError):  # the folder of its socket is removed before, if the start was aborted
        server._stop()


def mark_as_fork_server() -> None:
    """Record that schedulers are forked from this process."""
    global _fork_server
    _fork_server = os.getpid()


@contextmanager
def forking_schedulers() -> Iterator[None]:
    """Fork the processes that SGLang starts within the block from the server instead of spawning them."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


class SchedulerProcess:
    """Main function of a scheduler process; takes the arguments of SGLang's `run_scheduler_process`."""

    def __init__(self, log_dir: str, gate: str | None = None) -> None:
        """`gate`: the file at which to wait after the imports, before any device memory is allocated; None: none."""
        self.log_dir, self.gate = log_dir, gate

    def __reduce__(self) -> tuple[Callable[..., SchedulerProcess], tuple[int, dict[str, str], str, str | None]]:
        return _enter_scheduler_process, (os.getpid(), dict(os.environ), self.log_dir, self.gate)

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Run the scheduler until it fails; does not return."""
        from sglang.srt.managers.scheduler import run_scheduler_process

        from megarl.rollout.sglang.cpu_attention_backend import use_batched_attention_on_cpu
        from megarl.rollout.sglang.cpu_determinism import install_cpu_kernels
        from megarl.rollout.sglang.cpu_mla import use_absorbed_mla_on_cpu
        from megarl.rollout.sglang.cpu_shared_prefill import use_shared_prefill_on_cpu
        from megarl.rollout.sglang.partial_output import send_versions_with_partial_outputs
        from megarl.rollout.sglang.scheduler_idling import idle_on_cpu

        install_cpu_kernels()
        use_absorbed_mla_on_cpu()
        use_batched_attention_on_cpu()
        use_shared_prefill_on_cpu()
        idle_on_cpu()
        send_versions_with_partial_outputs()
        if self.gate is not None:
            import sglang.srt.models.registry  # noqa: F401 -- imports the models, which loading one would do

            wait_at_gate(self.gate)
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


def _enter_scheduler_process(
    host: int, environment: Mapping[str, str], log_dir: str, gate: str | None
) -> SchedulerProcess:
    set_parent_death_signal(signal.SIGKILL, parent=_fork_server or host)
    # SGLang has set variables since the server was started. The others keep their place in memory, because the process
    # title is written there.
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    log = os.open(log_file(log_dir, os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # a progress bar otherwise creates a multiprocessing lock, which stays in shared memory if this process is killed
    tqdm.set_lock(threading.RLock())
    return SchedulerProcess(log_dir, gate)
