"""Hosts an SGLang engine, or the part of one node: the thread that owns it, and the scheduler processes.

caller's event loop            engine thread (its own event loop)         scheduler processes
call(coroutine) -------------> tokenizer manager ---- zmq -------------->  one per TP rank
     <------------------------ result                                      (they die with this process)
     <------------------------ LostEngineError, once one of them has exited

Only the first node of an engine has a tokenizer manager; `MultiNodeHost` asks the hosts of the other nodes.

The thread is needed for two reasons. SGLang installs signal handlers if it runs in the main thread, and spawned
schedulers live only as long as the *thread* that started them.

Its temporary folder is removed even if the process is killed: by the next one that creates such a folder. A process
holds a lock on a file in its folder for as long as it lives.

Requests that reach the engine together go to its schedulers in one message. SGLang sends a message for each request. A
scheduler that waits wakes up at the first one, so it computes a batch of a few prompts while the host still sends the
others, and further small batches after it:

one by one    host       | 1 | 2 | 3 | ... | 128 |
              scheduler      | 1 | 2 to 9 | 10 to 40 | ...
together      host       | 1 to 128 |
              scheduler             | 1 to 128 |
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import copy
import fcntl
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import psutil

from megarl.cluster.process.atomic_files import quote_tail
from megarl.cluster.process.ports import is_port_free
from megarl.cluster.process.process_start import record_imports
from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang.scheduler_process import (
    PROCESS_GATE,
    SchedulerProcess,
    forking_schedulers,
    ignore_sigquit,
    log_file,
    skip_other_models,
    start_fork_server,
    stop_fork_server,
)
from megarl.engines.sglang.server_args import make_engine_arguments
from megarl.engines.sglang.weight_update.messages import RankFiles, Reply, ReplyState
from megarl.errors import ConfigError, LostEngineError, WorkerError

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import PortArgs, ServerArgs


def make_tokenizer_manager_class() -> type[TokenizerManager]:
    """Return a subclass of SGLang's tokenizer manager that sends the requests of one event-loop iteration together."""
    from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    class BatchingTokenizerManager(TokenizerManager):  # type: ignore[misc]
        """Its schedulers get all messages in the order in which they were sent."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            self._unsent: list[TokenizedGenerateReqInput] = []
            super().__init__(*args, **kwargs)

        def _dispatch_to_scheduler(self, obj: Any) -> None:
            if not isinstance(obj, TokenizedGenerateReqInput):
                self._send_requests()
                super()._dispatch_to_scheduler(obj)
                return
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._send_requests)
            self._unsent.append(copy.copy(obj))  # the caller decodes a field again that it has encoded to send it

        async def _async_dispatch_to_scheduler(self, obj: Any) -> None:
            self._send_requests()
            await super()._async_dispatch_to_scheduler(obj)

        def _send_requests(self) -> None:
            requests, self._unsent = self._unsent, []
            if requests:
                single = len(requests) == 1
                super()._dispatch_to_scheduler(
                    requests[0] if single else BatchTokenizedGenerateReqInput(batch=requests)
                )

    return BatchingTokenizerManager


NO_BLOCKING_VARIABLE = "SGLANG_BLOCK_NONZERO_RANK_CHILDREN"
"""Environment variable of SGLang: "0" lets the launch of a later node of an engine return once it has started."""

ADDRESS_VARIABLE = "SGLANG_HOST_IP"
"""Environment variable of SGLang: address at which TP ranks of other nodes connect to those of this node.

Otherwise SGLang takes the address of the interface with the default route. If it leads elsewhere, the ranks wait for
each other forever.
"""


def set_node_variables(address: str) -> None:
    """Set the environment variables with which this process can host one of several nodes of an engine.

    Args:
        address: address of this node for the others, unless the user has set `ADDRESS_VARIABLE`.
    """
    os.environ[NO_BLOCKING_VARIABLE] = "0"
    os.environ.setdefault(ADDRESS_VARIABLE, address)


def make_engine_class(
    log_dir: str,
    *,
    gate: str | None,
    forks: bool,
    before_launch: Callable[[Path], None],
    on_launch: Callable[[list[BaseProcess]], None],
) -> type[Engine]:
    """Return a subclass of `sglang.Engine`; imports SGLang, which takes seconds.

    Args:
        log_dir: folder for the logs of the scheduler processes.
        gate: the file of the `StartGate` at which they wait after their imports; None: they do not wait.
        forks: fork the schedulers from the fork server instead of spawning them.
        before_launch: called before the schedulers are started, with the file in shared memory in which SGLang's
            processes publish their load and which they do not remove.
        on_launch: called with the processes that have been started.
    """
    from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager

    class HostedEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = SchedulerProcess(log_dir, gate)
        init_tokenizer_manager_func = staticmethod(
            partial(init_tokenizer_manager, TokenizerManagerClass=make_tokenizer_manager_class())
        )

        @classmethod
        def _launch_scheduler_processes(cls, *args: object, **kwargs: object) -> tuple[object, list[BaseProcess]]:
            before_launch(_find_load_snapshot(*args, **kwargs))
            with forking_schedulers() if forks else nullcontext():
                result, processes = super()._launch_scheduler_processes(*args, **kwargs)
            on_launch(processes)
            return result, processes

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: object) -> tuple[list[BaseProcess], list[str]]:
            return [], []  # the schedulers send token ids directly to the tokenizer manager

    return HostedEngine


@contextmanager
def temporary_files_in(directory: str) -> Iterator[None]:
    """Create temporary files, such as SGLang's sockets, in `directory` within the block."""
    before, tempfile.tempdir = tempfile.tempdir, directory
    try:
        yield
    finally:
        tempfile.tempdir = before


def _find_load_snapshot(server_args: ServerArgs, port_args: PortArgs, *_: object, **__: object) -> Path:
    from sglang.srt.managers.load_snapshot import shm_path_for

    return Path(shm_path_for(port_args.instance_id))


LOCK_FILE = "in-use"


class PrivateFolder:
    """A temporary folder that belongs to this process until `remove` is called."""

    def __init__(self, prefix: str) -> None:
        """Create the folder among the system's temporary files, and remove those of dead processes with this prefix."""
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            remove_abandoned(folder)
        while True:
            self.path = tempfile.mkdtemp(prefix=prefix)
            self._lock = (Path(self.path) / LOCK_FILE).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (Path(self.path) / LOCK_FILE).exists():
                break
            self._lock.close()  # another process locked it first, and removed the folder as abandoned

    def remove(self) -> None:
        """Remove the folder and its contents; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_abandoned(folder: Path) -> None:
    """Remove the private folder of an engine whose process has ended; leave any other folder as it is."""
    try:
        lock = (folder / LOCK_FILE).open()
    except OSError:
        return  # not a private folder, or one that is just being created
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(folder, ignore_errors=True)


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- where SGLang creates them

MIN_AGE_SECONDS = 10.0
"""Younger queues are kept: they may belong to a process in another container, which is not visible here. Older queues
no longer need their name, because all processes have opened them."""

_NAME = re.compile(r"sgl_shm_mq_(\d+)_[0-9a-f]+")


def remove_abandoned_queues(folder: Path = SHARED_MEMORY) -> None:
    """Remove the queues whose processes no longer exist."""
    for pid, path in _queues(folder):
        if not psutil.pid_exists(pid) and _age(path) > MIN_AGE_SECONDS:
            path.unlink(missing_ok=True)


def remove_queues_of(pids: Iterable[int], folder: Path = SHARED_MEMORY) -> None:
    """Remove the queues of the given processes, which must have exited."""
    ended = set(pids)
    for pid, path in _queues(folder):
        if pid in ended:
            path.unlink(missing_ok=True)


def _queues(folder: Path) -> list[tuple[int, Path]]:
    names = ((_NAME.fullmatch(path.name), path) for path in folder.glob("sgl_shm_mq_*"))
    return [(int(match[1]), path) for match, path in names if match]


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


T = TypeVar("T")

PING_POLL_SECONDS = 0.5
"""How often to check whether schedulers that do not reply to a ping have used CPU time since."""

MAX_BUSY_SECONDS = 300.0
"""How long schedulers may be busy without a reply: one that waits for another rank's hung GPU spins and looks busy."""


class EngineHost:
    """Starts, monitors and stops one `sglang.Engine`, or the schedulers of one node of an engine."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._node_ranks = spec.node_ranks
        self.directory = ""
        """Private folder of this engine, for sockets and other files; created at launch, removed by `shutdown`."""
        self.failure: LostEngineError | None = None
        self._pending_ping: asyncio.Task[object] | None = None
        """The last ping to the schedulers, until they reply."""
        self._pinged_at = 0.0
        self.processes: list[BaseProcess] = []
        """The schedulers, by TP rank."""
        self._controllers: list[BaseProcess] = []
        """SGLang's process that distributes requests over the groups of data-parallel attention, if there are some."""
        self._folder: PrivateFolder | None = None
        self._log_dir = spec.log_dir or ""
        self._engine: Engine | None = None
        self._load_snapshot: Path | None = None
        """File in shared memory that SGLang's processes map and do not remove."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._calls: set[asyncio.Task[object]] = set()
        self._started_fork_server = False
        self._stopping = False

    @property
    def tokenizer_manager(self) -> TokenizerManager:
        """SGLang's tokenizer manager, the front end of the engine; its coroutines must run through `call`."""
        if self._engine is None:
            raise LostEngineError("the engine is not running")
        return self._engine.tokenizer_manager

    async def start(self) -> None:
        """Start the engine and return once it is ready.

        The timeout counts from when device memory may be allocated, if the engine waits for that.

        Raises:
            ConfigError: the port is in use, or SGLang does not know an argument.
            WorkerError: the engine did not start; the message has the last lines of its log. A LostEngineError if its
                schedulers were killed.
        """
        if self.spec.port is not None and self.spec.node_rank == 0:
            check_port(self.spec.port)
        ignore_sigquit()
        if self._log_dir:
            Path(self._log_dir).mkdir(parents=True, exist_ok=True)
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True, name="megarl-engine")
        self._thread.start()
        started = asyncio.wrap_future(ready)
        if self.spec.waits_for_memory:
            opened = asyncio.ensure_future(PROCESS_GATE.wait_open())
            await asyncio.wait([started, opened], return_when=asyncio.FIRST_COMPLETED)
            opened.cancel()
        try:
            await asyncio.wait_for(started, self.spec.start_timeout_seconds)
        except TimeoutError as e:
            log_tail = self._log_tail()
            await self.shutdown()
            seconds = self.spec.start_timeout_seconds
            raise WorkerError(f"the engine did not start{self._where} within {seconds} s{log_tail}") from e

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's thread and return its result.

        Raises:
            LostEngineError: a scheduler process has exited, or exits before the coroutine is done.
        """
        if self._loop is None or self._stopping:
            work.close()
            raise self.failure or LostEngineError("the engine is not running")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._track(work), self._loop))

    async def watch(self) -> NoReturn:
        """Wait until the engine ends, and raise the reason.

        Raises:
            LostEngineError: a scheduler process has exited, or the engine was shut down.
        """
        await self.call(asyncio.Event().wait())
        raise AssertionError("the event is never set")

    async def ping(self) -> None:
        """Return once the scheduler processes are known to be alive; never returns if they are hung.

        They are alive if they reply, or if all of them use CPU time: during a long step they cannot reply. CPU time
        counts for at most `MAX_BUSY_SECONDS` after a ping.

        Raises:
            LostEngineError: a scheduler process has exited.
        """
        await self.call(self.ping_schedulers())

    async def describe(self, rank: int) -> str:
        """Return the TP rank, pid and OS process state of a scheduler process as text, for error messages."""
        pid = self.processes[rank - self._node_ranks[0]].pid
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return f"TP rank {rank} (pid {pid}, ended){self._where}"
        (state,) = re.findall(r"^State:\t\w \((.*)\)$", status, re.MULTILINE)
        return f"TP rank {rank} (pid {pid}, {state}){self._where}"

    async def scheduler_pids(self) -> list[int]:
        """Return the pid of each scheduler process, by TP rank."""
        return [process.pid or 0 for process in self.processes]

    async def processor_seconds(self) -> list[float]:
        """Return the CPU seconds that each scheduler process has used, by TP rank."""
        spent = []
        for process in self.processes:
            try:
                spent.append(sum(psutil.Process(process.pid).cpu_times()[:2]))
            except psutil.NoSuchProcess:
                spent.append(0.0)  # `_on_exit` will report it
        return spent

    async def share_file(self, name: str, content: bytes) -> list[str]:
        """Write a file for the TP ranks; return the path at which each of them can read it."""
        return [self._files.share(name, content)] * len(self._node_ranks)

    async def remove_file(self, name: str) -> None:
        """Remove a shared file."""
        self._files.remove(name)

    async def folders(self) -> list[str]:
        """Return for each TP rank the folder on its node in which it exchanges files with the host."""
        return [self.directory] * len(self._node_ranks)

    async def reply_states(self, number: int) -> list[ReplyState]:
        """Return the state of each TP rank for command `number`."""
        return self._files.states(number)

    async def take_replies(self, number: int) -> list[Reply | None]:
        """Return each TP rank's reply to command `number`, None for a missing one, and remove the files."""
        return self._files.take_replies(number)

    async def shutdown(self) -> None:
        """Stop the engine's processes and thread; calls in progress raise LostEngineError."""
        if not self._stopping:
            self._stopping = True
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
            else:
                self._kill()  # the launch then fails
                self._remove_folder()  # the launch may take longer than the caller waits
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self, ready: concurrent.futures.Future[None]) -> None:
        ready.set_running_or_notify_cancel()  # a caller that timed out must not cancel it
        try:
            self._launch()
        except ConfigError as e:
            ready.set_exception(e)
        except (Exception, SystemExit) as e:  # noqa: BLE001 -- any error of SGLang's goes to the caller
            codes = [process.exitcode or 0 for process in self._all_processes]
            # ended by a signal, and none by its own error: not caused by the model or the configuration
            kind = LostEngineError if min(codes, default=0) < 0 and max(codes) <= 0 else WorkerError
            error = kind(f"the engine did not start{self._where}: {type(e).__name__}: {e}{self._log_tail()}")
            error.__cause__ = e
            ready.set_exception(error)
        else:
            ready.set_result(None)
            if self._loop is not None:
                self._loop.run_forever()
        self._clean_up()

    def _launch(self) -> None:
        forks = self.spec.device == "cpu"
        self._folder = PrivateFolder("megarl-engine-")
        self.directory = self._folder.path
        self._check_not_stopped()  # `shutdown` may have found no folder to remove
        self._log_dir = self._log_dir or self.directory
        gate = PROCESS_GATE.close(self.directory) if self.spec.waits_for_memory else None
        if self.spec.nnodes > 1:
            set_node_variables(self.spec.node_address)
        skip_other_models(self.spec.model_path)
        if forks:
            self._started_fork_server = start_fork_server(self.directory)
        with record_imports():
            engine_class = make_engine_class(
                self._log_dir,
                gate=gate,
                forks=forks,
                before_launch=self._before_launch,
                on_launch=self._on_launch,
            )
        self._check_not_stopped()  # the import takes seconds
        remove_abandoned_queues()
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        with temporary_files_in(self.directory):
            self._engine = engine_class(**make_engine_arguments(self.spec))
        if self.spec.node_rank == 0:
            self.tokenizer_manager.load_snapshot_reader.read(0)  # maps the file, if it did not exist before
        self._remove_load_snapshot()  # every process has mapped the file; without a name it cannot be left behind
        if self.spec.node_rank == 0:
            self.tokenizer_manager._subprocess_watchdog.stop()  # it would send this process a SIGQUIT
            # a full garbage collection over all SGLang modules takes 0.4 s, and flushing the cache triggers one
            loop.run_until_complete(self.tokenizer_manager.freeze_gc())
        for rank, process in zip(self._node_ranks, self.processes, strict=True):
            what = f"scheduler process of TP rank {rank}"
            loop.add_reader(process.sentinel, self._on_exit, what, process)
        for process in self._controllers:
            loop.add_reader(process.sentinel, self._on_exit, "process that distributes requests", process)
        if not self._stopping:
            self._loop = loop

    def _before_launch(self, load_snapshot: Path) -> None:
        self._check_not_stopped()
        self._load_snapshot = load_snapshot

    def _on_launch(self, processes: list[BaseProcess]) -> None:
        num_controllers = len(processes) - len(self._node_ranks)
        self._controllers += processes[:num_controllers]
        self.processes += processes[num_controllers:]

    def _check_not_stopped(self) -> None:
        if self._stopping:
            raise WorkerError("the engine was stopped during startup")

    async def ping_schedulers(self) -> None:
        """As `ping`, without regard to an engine that has failed or ends meanwhile."""
        if self._pending_ping is None or self._pending_ping.done():
            self._pending_ping = asyncio.ensure_future(self.tokenizer_manager.get_internal_state())
            self._calls.add(self._pending_ping)
            self._pending_ping.add_done_callback(self._calls.discard)
            self._pinged_at = time.monotonic()
        before = await self.processor_seconds()
        while not self._pending_ping.done():
            await asyncio.wait([self._pending_ping], timeout=PING_POLL_SECONDS)
            now = await self.processor_seconds()
            is_busy = all(spent > earlier for spent, earlier in zip(now, before, strict=True))
            if is_busy and time.monotonic() - self._pinged_at <= MAX_BUSY_SECONDS:
                return

    async def _shut_down(self) -> None:
        self.failure = self.failure or LostEngineError("the engine was shut down")
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)  # the callers are resumed in the loop's next iteration
        assert self._loop is not None
        self._loop.stop()

    async def _track(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        if self.failure:
            work.close()
            raise self.failure
        self._calls.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self.failure:
                raise self.failure from None
            raise
        finally:
            self._calls.discard(task)

    def _on_exit(self, what: str, process: BaseProcess) -> None:
        assert self._loop is not None
        self._loop.remove_reader(process.sentinel)
        process.join()
        code = process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self._fail(LostEngineError(f"the engine's {what}{self._where} {how}{self._log_tail(process)}"))

    def _fail(self, error: LostEngineError) -> None:
        """End the engine because of `error`, unless it has ended; must run in the engine's thread."""
        if self._stopping or self.failure:
            return
        self.failure = error
        self._kill()
        for call in list(self._calls):
            call.cancel()

    @property
    def _where(self) -> str:
        return f" on {self.spec.node_name}" if self.spec.node_name else ""

    @property
    def _files(self) -> RankFiles:
        return RankFiles(self.directory, self._node_ranks)

    def _log_tail(self, process: BaseProcess | None = None) -> str:
        for candidate in [process] if process else self._all_processes:
            log = log_file(self._log_dir, candidate.pid or 0)
            if quoted := quote_tail(log):
                return f"; {quoted}"
        return ""

    @property
    def _all_processes(self) -> list[BaseProcess]:
        return self._controllers + self.processes

    def _kill(self) -> None:
        for process in self._all_processes:
            process.kill()

    def _clean_up(self) -> None:
        self._kill()
        for process in self._all_processes:
            process.join()
        if self._engine is not None:
            atexit.unregister(self._engine.shutdown)
        if self._started_fork_server:
            stop_fork_server()
        remove_queues_of(process.pid for process in self._all_processes if process.pid is not None)
        self._remove_load_snapshot()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    def _remove_load_snapshot(self) -> None:
        if self._load_snapshot is not None:
            self._load_snapshot.unlink(missing_ok=True)


def check_port(port: int) -> None:
    """Check that `port` is free on this node.

    Raises:
        ConfigError: another socket is bound to the port.
    """
    if not is_port_free(port):
        raise ConfigError(f"rollout.engine.base_port: port {port} is in use")
