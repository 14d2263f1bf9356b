"""Child processes of an asyncio event loop: each in its own process group, all reaped in one place.

asyncio's own subprocesses do not suffice: they also wait for the end of the output, which orphans of a child may keep
open, and they do not reap orphans that this process has adopted.

Work that runs in a child process leaves no process behind, even if parent or child is killed:

process    what it does                                   if it is killed
parent     waits and forwards signals                     the child gets SIGTERM and ends gracefully
child      runs the work, terminates what it started      the parent adopts its processes and terminates them
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def become_subreaper() -> None:
    """Make this process the subreaper: a descendant whose parent ends becomes its child."""
    _call_prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(number: signal.Signals, *, parent: int) -> None:
    """Make this process get signal `number` when its parent dies; exit if it has died already.

    Args:
        parent: pid of the parent at the time it created this process.
    """
    _call_prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def _call_prctl(option: int, value: int) -> None:
    if _prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


POLL_SECONDS = 0.02


def make_preexec(parent_death_signal: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn` for a child process that gets `parent_death_signal` when this process dies."""
    parent = os.getpid()

    def prepare() -> None:
        # SIGUSR1 is only a notice: a program that does not handle it must not die, so it stays pending
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        set_parent_death_signal(parent_death_signal, parent=parent)

    return prepare


def terminate_descendants(grace_seconds: float) -> list[str]:
    """Terminate every descendant: SIGTERM, and SIGKILL to those left after `grace_seconds`.

    To be called last: it also reaps children that other code has started and may wait for.

    Returns:
        "name (pid)" of the processes that needed SIGKILL.
    """
    deadline = time.monotonic() + grace_seconds
    signaled: set[int] = set()
    killed: dict[int, str] = {}
    while descendants := _live_descendants():
        late = time.monotonic() > deadline
        for process in descendants:
            try:
                if late:
                    killed.setdefault(process.pid, f"{process.name()} ({process.pid})")
                    process.kill()
                elif process.pid not in signaled:
                    signaled.add(process.pid)
                    process.terminate()
            except psutil.NoSuchProcess:
                continue
        time.sleep(POLL_SECONDS)
    return list(killed.values())


def _live_descendants() -> list[psutil.Process]:
    """Return the running descendants; reap the children that have ended."""
    living = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return living


FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

GRACE_SECONDS = 2.0
"""Grace period for processes that are left when the work is done."""


def run_as_subreaper(work: Callable[[], bytes]) -> tuple[bytes, int]:
    """Run `work` in a child process; forward termination signals to it and leave no descendant behind.

    Returns:
        The bytes that `work` returned, and the exit code of the child; empty and not 0 if it failed.
    """
    forwarded = {number for number in FORWARDED_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}  # nohup
    awaited = forwarded | {signal.SIGCHLD}
    become_subreaper()
    preexec = make_preexec(signal.SIGTERM)
    read_fd, write_fd = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            preexec()
            _run_in_child(work, write_fd)
        os.close(write_fd)
        code = _wait_for_child(child, awaited)
    finally:
        terminate_descendants(GRACE_SECONDS)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with os.fdopen(read_fd, "rb") as reader:
        return reader.read(), code


def _run_in_child(work: Callable[[], bytes], write_fd: int) -> None:
    """Run `work` in the child and write its result to the file descriptor `write_fd`; does not return."""
    code = 1
    try:
        os.setpgid(0, 0)  # the parent forwards what its group receives
        become_subreaper()
        try:
            result = work()
        finally:
            terminate_descendants(GRACE_SECONDS)
        with os.fdopen(write_fd, "wb") as writer:
            writer.write(result)
        code = 0
    except BaseException:  # noqa: BLE001 -- the parent's code must not continue in the child
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for_child(child: int, awaited: set[signal.Signals]) -> int:
    while True:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)


class ChildProcess:
    """A child process, created by `ChildProcesses.start`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Resolves to the exit code, or to the negative number of the signal that ended the process."""

    def send_line(self, line: bytes) -> None:
        """Write `line` to the child's stdin and close it; does nothing if the child has closed it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.close()

    async def output(self) -> asyncio.StreamReader:
        """Return the child's stdout and stderr as one stream; only for a child started with `capture_output`."""
        assert self._process.stdout is not None
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self._process.stdout)
        return reader

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child, unless it has ended."""
        if not self.ended.done():
            os.kill(self.pid, number)

    async def terminate(self, grace_seconds: float) -> None:
        """Terminate the child: SIGTERM, after `grace_seconds` SIGKILL; wait until it has ended."""
        self.signal(signal.SIGTERM)
        await asyncio.wait((self.ended,), timeout=grace_seconds)
        self.signal(signal.SIGKILL)
        await asyncio.wait((self.ended,))  # unlike awaiting the future, this does not cancel it

    def set_exit_code(self, code: int) -> None:
        """Record that the child has ended with exit code `code`."""
        self._process.returncode = code
        self.ended.set_result(code)


class ChildProcesses:
    """Starts and reaps the child processes of the running event loop; reaps adopted orphans too."""

    def __init__(self) -> None:
        self._children: dict[int, ChildProcess] = {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        parent_death_signal: signal.Signals,
        has_stdin: bool = False,
        capture_output: bool = False,
    ) -> ChildProcess:
        """Start a child in its own process group; this process forwards the signals that its own group receives.

        Args:
            command: program and arguments.
            environment: the complete environment of the child.
            parent_death_signal: signal that the child gets when this process dies.
            has_stdin: open a pipe to its stdin, for `ChildProcess.send_line`.
            capture_output: read its output with `ChildProcess.output` instead of showing it to the user.
        """
        process = subprocess.Popen(  # noqa: S603 -- the launcher's own command lines
            command,
            env=environment,
            stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture_output else None,
            stderr=subprocess.STDOUT if capture_output else None,
            process_group=0,
            preexec_fn=make_preexec(parent_death_signal),
        )
        child = self._children[process.pid] = ChildProcess(process)
        return child

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # this process has no children
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                child = self._children.pop(reaped[0], None)
                if child is not None:  # otherwise it was an adopted orphan
                    child.set_exit_code(os.waitstatus_to_exitcode(reaped[1]))
