"""The first process of a sandbox: forks a process for each program, collects its output and ends what is left of it.

host  -- requests -->  runner  -- fork -->                     program
      <-- outcomes --          <-- stdout, stderr, value: data

Programs have no file descriptor of the host: the runner alone reports how a program ended. A process reads its source
and its one input from the host before it becomes the program, so that no other input has ever been in its memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import marshal
import os
import resource
import selectors
import signal
import sys
import time

from megarl.sandbox.guest.channel import Limits, encode_request, read_request, write_reply
from megarl.sandbox.guest.confine import FOLDER, confine, limit_cpu
from megarl.sandbox.guest.program import CELL_ENDS, end_of_cell, run_call, run_interpreter, run_program
from megarl.sandbox.guest.seccomp import PR_SET_PDEATHSIG, libc_call, prctl

TYPE_CHECKING = False  # of `typing`, without its import, which delays the start of a sandbox
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

POLL_SECONDS = 0.02
"""Time between two checks of the memory of all processes."""

CHANNEL = 3
"""File descriptor of the connection to the host; those below it, and this one, are pipes in a program."""

MNT_DETACH = 2
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 2, 4, 8, 32
PAGE = resource.getpagesize()
CELL_BYTES = 64 * 1024
"""Bytes of a cell that are written at once."""


INPUT_FILE = ".input"
"""File in the sandbox's folder that has the input of a program, until it is deleted before the program starts."""

HANDLED_BY_PYTHON: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGPIPE: signal.SIG_IGN,
    signal.SIGXFSZ: signal.SIG_IGN,
}
"""What a new Python does at signals that have another effect than the kernel's default."""


class _Process:
    """A program that runs, with the ends of its pipes that belong to the runner."""

    def __init__(self, pid: int, outputs: dict[int, str]) -> None:
        """Open a file descriptor of the process.

        Args:
            pid: its process id.
            outputs: file descriptor -> name of the output that is read from it.
        """
        self.pid, self.pidfd = pid, _open_pidfd(pid)
        self.outputs = outputs
        self.collected = {name: bytearray() for name in outputs.values()}
        self.open_fds = {*outputs} | ({self.pidfd} if self.pidfd is not None else set())


class Runner:
    """Answers the requests of a host."""

    def __init__(self, channel: int, limits: Limits, *, is_init: bool) -> None:
        """`is_init`: this process is the first of a pid namespace, and may signal all others in it."""
        self._channel, self._limits, self._is_init = channel, limits, is_init
        self._interpreter: _Process | None = None
        self._cells = self._ends = -1
        self._num_cells = 0

    def serve(self) -> None:
        """Answer requests until the host closes the channel; then end this process, and with it the sandbox.

        `{"kind": "cell", "source"}` is a cell of the interpreter. `{"kind": "case", "wall_seconds"}` is followed by
        `{"source", "setup", "stdin" or "call"}`, which the process of the program reads.
        """
        for number in signal.valid_signals() - {signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)  # also those of programs
        with contextlib.suppress(OSError):  # the host has closed the channel
            write_reply(self._channel, {"ready": True})
            while (request := read_request(self._channel)) is not None:
                if request["kind"] == "cell":
                    write_reply(self._channel, self._run_cell(request["source"]))
                    continue
                self._end_interpreter()
                write_reply(self._channel, self._run_case(request["wall_seconds"]))
        os._exit(0)  # the kernel ends all processes of the namespace

    def _run_case(self, wall_seconds: float) -> dict[str, Any]:
        """Return the outcome of a program on the case that comes next, and whether it has left the folder as it was."""
        state_read, state_write = os.pipe()

        def prepare() -> tuple[int, Callable[[int], None]]:
            case = read_request(self._channel)
            if case is None:
                os._exit(1)  # the host has closed the channel
            call: str | None = case.get("call")
            stdin = _open_input(case["stdin"]) if call is None else os.open(os.devnull, os.O_RDONLY)
            os.write(state_write, _folder_state())

            def execute(value_fd: int) -> None:
                limit_cpu(self._limits.cpu_seconds)
                if call is not None:
                    run_call(case["source"], case["setup"], call, value_fd)
                run_program(case["source"])

            return stdin, execute

        process = self._start(prepare)
        os.close(state_write)
        state = os.read(state_read, len(_folder_state()))  # when the process has read its case; nothing if it could not
        os.close(state_read)
        outcome = self._finish(process, self._watch(process, wall_seconds, stop_at_limit=True))
        if any(len(collected) > self._limits.output_bytes for collected in process.collected.values()):
            outcome["status"] = "output"  # also where a program has ended before its output was read
        return outcome | {"clean": state == _folder_state()}

    def _run_cell(self, source: str) -> dict[str, Any]:
        """Return the outcome of a cell; an interpreter that has ended or was killed is replaced for the next cell."""
        if self._interpreter is None:
            cells, self._cells = os.pipe()
            self._ends, ends = os.pipe()

            def prepare() -> tuple[int, Callable[[int], None]]:
                return os.open(os.devnull, os.O_RDONLY), lambda _: run_interpreter(cells, ends)

            self._interpreter = self._start(prepare, keep=(cells, ends))
            os.close(cells)
            os.close(ends)
            self._num_cells = 0
        self._num_cells += 1
        process = self._interpreter
        self._signal_all(signal.SIGCONT, process.pid)
        cell = encode_request({"source": source})
        reason = self._watch(process, self._limits.wall_seconds, stop_at_limit=False, cell=cell)
        if reason in ("ok", "error"):
            self._signal_all(signal.SIGSTOP, process.pid)  # nothing runs between two cells
            outputs = {name: bytes(collected) for name, collected in process.collected.items()}
            process.collected = {name: bytearray() for name in process.collected}
            return _outcome(reason, outputs)
        return self._end_interpreter(reason)

    def _end_interpreter(self, reason: str = "killed") -> dict[str, Any]:
        """End the interpreter, if there is one, and return its outcome."""
        if self._interpreter is None:
            return {}
        process, self._interpreter = self._interpreter, None
        os.close(self._cells)
        os.close(self._ends)
        outcome = self._finish(process, reason)
        # whatever its exit code, its cell has not finished and its variables are lost
        return outcome | {"status": "exit"} if reason == "exit" else outcome

    def _start(
        self, prepare: Callable[[], tuple[int, Callable[[int], None]]], *, keep: tuple[int, ...] = ()
    ) -> _Process:
        """Fork a process for a program.

        Args:
            prepare: called in the process while it has the files of the runner. Returns the file descriptor of its
                input, and what it calls then with the file descriptor that a value may be written to.
            keep: file descriptors that the process needs beside.
        """
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "value")}
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                stdin, execute = prepare()
                self._enter_program([stdin, *(write for _, write in pipes.values()), *keep], execute)
            finally:
                os._exit(1)
        for _, write in pipes.values():
            os.close(write)
        return _Process(pid, {read: name for name, (read, _) in pipes.items()})

    def _enter_program(self, fds: list[int], execute: Callable[[int], None]) -> None:
        """Turn this forked process into the program's: its pipes are 0 to 3, and it has no others of the runner."""
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the kernel ends programs before the runner
        high = 1 + max(*fds, 16)
        for i, fd in enumerate(fds[:4]):
            os.dup2(fd, high + i)
        for i in range(4):
            os.dup2(high + i, i)
        kept = sorted(fds[4:])
        start = 4
        for fd in kept:
            os.closerange(start, fd)
            start = fd + 1
        os.closerange(start, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, HANDLED_BY_PYTHON.get(number, signal.SIG_DFL))
        sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115 -- of this process until it ends
        sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
        os.environ.clear()
        os.environ.update(PATH="/usr/bin:/bin", HOME=FOLDER, TMPDIR=FOLDER, LANG="C.UTF-8")
        execute(3)

    def _watch(self, process: _Process, wall_seconds: float, *, stop_at_limit: bool, cell: bytes = b"") -> str:
        """Read from a process until it ends, a limit is reached, or its cell has ended; return which.

        Args:
            process: the process.
            wall_seconds: its limit of time.
            stop_at_limit: end a process at the limit of its output; otherwise further output is dropped.
            cell: message to an interpreter, which reports the end of a cell; empty for a program.
        """
        limits = self._limits
        deadline = time.monotonic() + wall_seconds
        next_check = 0.0
        baseline = _resident(os.getpid())  # of each process, shared with this one
        to_write = memoryview(cell)
        with selectors.DefaultSelector() as selector:
            if process.pidfd is not None:
                selector.register(process.pidfd, selectors.EVENT_READ)
            selector.register(self._channel, selectors.EVENT_READ)
            for fd in process.outputs:
                if fd in process.open_fds:
                    selector.register(fd, selectors.EVENT_READ)
            if cell:
                os.set_blocking(self._cells, False)
                selector.register(self._ends, selectors.EVENT_READ)
                selector.register(self._cells, selectors.EVENT_WRITE)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    return "timeout"
                for key, _ in selector.select(min(left, POLL_SECONDS)):
                    fd = int(key.fd)
                    if fd == self._channel:
                        os._exit(0)  # the host has closed it: it sends nothing before it has an answer
                    if fd == process.pidfd:
                        return "exit"
                    if cell and fd == self._cells:
                        to_write = self._write(fd, to_write)
                        if not to_write:
                            selector.unregister(fd)
                    elif cell and fd == self._ends:
                        self._drain(process)
                        return self._read_end(fd)
                    elif not self._read(process, fd):
                        selector.unregister(fd)
                    elif stop_at_limit and len(process.collected[process.outputs[fd]]) > limits.output_bytes:
                        return "output"
                if process.pidfd is None and _has_ended(process.pid):
                    return "exit"
                if self._is_init and time.monotonic() > next_check:
                    pids = _other_processes()
                    if len(pids) > limits.max_processes:  # gVisor has no limit of its own
                        return "killed"
                    if sum(max(0, _resident(pid) - baseline) for pid in pids) > limits.memory_bytes:
                        return "memory"
                    next_check = time.monotonic() + POLL_SECONDS

    def _write(self, fd: int, data: memoryview) -> memoryview:
        """Return what is left to write; nothing where the reader is gone."""
        try:
            return data[os.write(fd, data[:CELL_BYTES]) :] if data else data
        except BlockingIOError:
            return data
        except OSError:
            return memoryview(b"")

    def _read(self, process: _Process, fd: int) -> bool:
        """Read an output once and keep what is within the limit, and a byte more; return whether more may come."""
        data = os.read(fd, 64 * 1024)
        collected = process.collected[process.outputs[fd]]
        collected += data[: self._limits.output_bytes + 1 - len(collected)]
        if not data:
            self._close(process, fd)
        return bool(data)

    def _drain(self, process: _Process) -> None:
        """Read what is in the outputs, without waiting for more."""
        with selectors.DefaultSelector() as selector:
            for fd in process.outputs.keys() & process.open_fds:
                selector.register(fd, selectors.EVENT_READ)
            for _ in range(64):  # a program that keeps writing does not hold up the runner
                ready = selector.select(0)
                if not ready:
                    return
                for key, _ in ready:
                    if not self._read(process, int(key.fd)):
                        selector.unregister(key.fd)

    def _read_end(self, fd: int) -> str:
        """Return how a cell has ended; `exit`, which ends the interpreter, if it has ended or forges messages."""
        data = os.read(fd, 1024)
        ends = {end_of_cell(self._num_cells, status): status for status in CELL_ENDS.values()}
        return ends.get(data, "exit")

    def _finish(self, process: _Process, reason: str) -> dict[str, Any]:
        """End what is left of a process and its children, and return the outcome."""
        self._signal_all(signal.SIGKILL, process.pid)
        status, usage = self._reap(process.pid)
        self._drain(process)
        for fd in [*process.open_fds]:
            self._close(process, fd)
        outputs = {name: bytes(collected) for name, collected in process.collected.items()}
        code = os.waitstatus_to_exitcode(status)
        cpu_seconds = usage.ru_utime + usage.ru_stime
        if reason == "exit":
            late = code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_seconds >= self._limits.cpu_seconds)
            reason = "timeout" if late else "killed" if code < 0 else "error" if code else "ok"
        return _outcome(reason, outputs) | {"exit_code": code, "cpu_seconds": round(cpu_seconds, 4)}

    def _reap(self, pid: int) -> tuple[int, resource.struct_rusage]:
        """Wait for all processes of the namespace, which have been killed; return status and usage of one of them."""
        if not self._is_init:
            return os.wait4(pid, 0)[1:]
        found = None
        while True:
            try:
                ended, status, usage = os.wait4(-1, 0)
            except ChildProcessError:
                break
            if ended == pid:
                found = status, usage
        assert found is not None
        return found

    def _close(self, process: _Process, fd: int) -> None:
        process.open_fds.discard(fd)
        os.close(fd)

    def _signal_all(self, number: signal.Signals, session: int) -> None:
        """Send a signal to all other processes of the namespace; without a namespace, to a session's first group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._is_init:
                os.kill(-1, number)
            else:
                os.killpg(session, number)


def _open_input(text: str) -> int:
    """Return the file descriptor of a file with the input of a program, which has no name any more."""
    fd = os.open(INPUT_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    stdin = os.open(INPUT_FILE, os.O_RDONLY)
    os.unlink(INPUT_FILE)
    data = memoryview(text.encode(errors="surrogatepass"))
    while data:
        data = data[os.write(fd, data) :]
    os.close(fd)
    return stdin


def _folder_state() -> bytes:
    """Return what changes when a program creates, renames or deletes something in the folder, or changes its rights."""
    try:
        is_empty, changed_at = not os.listdir("."), os.stat(".").st_ctime_ns
    except OSError:  # a program may take the rights from its folder
        is_empty, changed_at = False, 0
    return f"{is_empty:d} {changed_at:020d}".encode()


def _open_pidfd(pid: int) -> int | None:
    """Return a file descriptor that is readable when a child has ended; None where the kernel, gVisor, has none."""
    try:
        return os.pidfd_open(pid)
    except OSError as e:
        if e.errno != errno.ENOSYS:
            raise
        return None


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _outcome(reason: str, outputs: dict[str, bytes]) -> dict[str, Any]:
    return {"status": reason} | {name: data.decode("utf-8", "replace") for name, data in outputs.items()}


def _resident(pid: int) -> int:
    """Return the resident bytes of a process; 0 where it has ended or there is no /proc."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def _other_processes() -> list[int]:
    """Return the processes of this namespace but this one; none where there is no /proc."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
    except OSError:
        return []


def main() -> None:
    """Run as the first process of a sandbox that another program has set up; argument: its settings, by `marshal`."""
    settings = marshal.loads(bytes.fromhex(sys.argv[1]))  # noqa: S302 -- of the host
    limits = Limits(**settings["limits"])
    os.chdir(FOLDER)
    for folder in settings["unmount"]:
        libc_call("umount2", folder.encode(), MNT_DETACH)
    if settings["hide_kernel"]:  # in /proc only processes are left
        flags = MS_REMOUNT | MS_NOSUID | MS_NODEV | MS_NOEXEC
        libc_call("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(flags), b"subset=pid")
    confine(limits, readable=settings["readable"], become_nobody=settings["become_nobody"])
    os.dup2(settings["channel"], CHANNEL)
    Runner(CHANNEL, limits, is_init=True).serve()
