"""The main function of SGLang's scheduler processes, which die with the process that hosts the engine.

A spawned process unpickles its main function first, and then its arguments, which import SGLang and take seconds.
Therefore the unpickling of the main function sets the parent-death signal and redirects the output to a log file.
A CPU engine forks its schedulers from a server process that has imported SGLang (`fork_server`).

The main function also limits the model files that SGLang imports to those of the model that the engine loads, of more
than 200, lets a paused scheduler of a CPU engine sleep, which would poll its sockets and compete for cores with the
trainer ranks that send the weights, and waits at a gate after the imports, until the devices have memory:

    engine host    |- imports SGLang -|- starts schedulers, waits ------- open ---------------------
    scheduler                          '- imports SGLang -|- wait_at_gate -'- allocates: loads the model
    trainer        |- imports, builds, offloads ---------------------------^

The host holds an exclusive lock on a file, for which schedulers wait; the kernel releases it if the host dies. Only a
GPU can show that SGLang's imports allocate no device memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import fcntl
import importlib.util
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm  # type: ignore[import-untyped]

from megarl.cluster.process.child_processes import set_parent_death_signal
from megarl.model_files.model_config import read_model_config

WAITING_MESSAGE = "SGLang is imported; waiting for device memory"
"""Printed to the log of a scheduler that waits."""

ALLOWED_MESSAGE = "allocating device memory"
"""Printed afterwards."""


class StartGate:
    """The gate of an engine's process, closed until `open` is called for the first time; methods may run in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locked_files: list[IO[bytes]] = []
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()

    def close(self, folder: str) -> str:
        """Return the file at which schedulers wait for `open`, in `folder`; they do not wait if it has been called."""
        path = Path(folder) / "start-gate"
        with self._lock:
            file = path.open("wb")
            fcntl.flock(file, fcntl.LOCK_EX)
            if self._opened.done():
                file.close()
            else:
                self._locked_files.append(file)
        return str(path)

    def open(self) -> None:
        """Let the schedulers pass, and all that will come to the gate."""
        with self._lock:
            for file in self._locked_files:
                file.close()
            self._locked_files = []
            if not self._opened.done():
                self._opened.set_result(None)

    async def wait_open(self) -> None:
        """Wait until `open` has been called."""
        await asyncio.shield(asyncio.wrap_future(self._opened))


PROCESS_GATE = StartGate()
"""The gate of this process, which hosts one engine."""


def wait_at_gate(path: str) -> None:
    """Block until the gate whose file is `path` is open."""
    with Path(path).open("rb") as file:
        _log(WAITING_MESSAGE)
        fcntl.flock(file, fcntl.LOCK_SH)
        _log(ALLOWED_MESSAGE)


def open_process_gate() -> None:
    """Open the gate of this process."""
    PROCESS_GATE.open()


def _log(message: str) -> None:
    sys.stdout.write(f"{datetime.now():[%Y-%m-%d %H:%M:%S]} {message}\n")  # as SGLang's lines begin
    sys.stdout.flush()


def capture_routes_on_cpu() -> None:
    """Keep the routes of the CPU engine in unpinned memory: SGLang pins it through CUDA; no-op if CUDA is available."""
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: object) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def fit_route_buffer() -> None:
    """Make room for the routes of a whole pass: SGLang takes the size of a chunk, also if prompts are not chunked."""
    from sglang.srt.runtime_context import get_schedule
    from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

    create = RoutedExpertsCapturer.create

    def create_with_room(*, num_tokens: int, max_running_requests: int, **others: Any) -> RoutedExpertsCapturer | None:
        is_chunked = get_schedule().chunked_prefill_size > 0
        room = max_running_requests if is_chunked else max(num_tokens, max_running_requests)
        return create(num_tokens=num_tokens, max_running_requests=room, **others)

    RoutedExpertsCapturer.create = staticmethod(create_with_room)


def idle_on_cpu() -> None:
    """Let schedulers in this process sleep during pauses, and flush without a garbage collection; no-op on CUDA."""
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.platforms.cpu import CpuDeviceMixin

    record_state = Scheduler._record_scheduler_state_for_paused_engine

    def record_state_and_sleep(scheduler: Scheduler) -> None:
        record_state(scheduler)
        scheduler.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_state_and_sleep
    # it collects garbage in every flush, and so in every weight update; Python collects it anyway
    CpuDeviceMixin.empty_cache = lambda _: None


VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"
"""Environment variable: names of the model files that SGLang does not import, separated by commas."""

FALLBACK = "transformers"
"""Name of the file with the models that SGLang takes from transformers."""


def skip_other_models(model_path: str) -> None:
    """Have SGLang, imported in this process or its children later, skip the files of other models.

    A variable that the user has set stays, and so does one for models from outside SGLang.
    """
    spec = importlib.util.find_spec("sglang")
    if VARIABLE in os.environ or "SGLANG_EXTERNAL_MODEL_PACKAGE" in os.environ or spec is None:
        return
    architectures = read_model_config(model_path).get("architectures", [])
    (folder,) = spec.submodule_search_locations or [""]
    os.environ[VARIABLE] = ",".join(find_other_models(Path(folder) / "srt" / "models", architectures))


def find_other_models(folder: Path, architectures: Sequence[str]) -> list[str]:
    """Return the names of the files in `folder` that define none of the classes; none if no file defines one."""
    defines = re.compile(rf"^class ({'|'.join(map(re.escape, architectures))})\b", re.MULTILINE)
    files = {path.stem: path.read_text() for path in sorted(folder.glob("*.py"))}
    needed = {name for name, source in files.items() if defines.search(source)} if architectures else set()
    return [name for name in files if name not in (*needed, FALLBACK)] if needed else []


FORK_SERVER_MODULES = ["megarl.engines.sglang.scheduler_server"]
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

        from megarl.engines.sglang.cpu.batching import (
            use_absorbed_mla_on_cpu,
            use_batched_attention_on_cpu,
            use_shared_prefill_on_cpu,
        )
        from megarl.engines.sglang.cpu.determinism import install_cpu_kernels
        from megarl.engines.sglang.request_runner import send_versions_with_partial_outputs

        install_cpu_kernels()
        use_absorbed_mla_on_cpu()
        use_batched_attention_on_cpu()
        use_shared_prefill_on_cpu()
        idle_on_cpu()
        capture_routes_on_cpu()
        fit_route_buffer()
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
