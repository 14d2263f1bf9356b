"""Child processes of an asyncio event loop: each in its own process group, all reaped in one place.

asyncio's own subprocesses do not suffice: they also wait for the end of the output, which orphans of a child may keep
open, and they do not reap orphans that this process has adopted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from megarl.process.descendants import make_preexec


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
