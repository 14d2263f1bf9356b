"""Child processes of an event loop: started in groups of their own, waited for in one place.

The loop's own subprocesses will not do: they wait for the end of the output too, which whatever a child has left
behind may keep open, and they know nothing of orphans that this process has adopted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from megarl.process.descendants import at_start_of_child


class Child:
    """A process that was started here; made by `Children.start`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit code, or the negative of the signal that ended it."""

    def tell(self, line: bytes) -> None:
        """Write to its stdin, which it may have closed, and close it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.close()

    async def output(self) -> asyncio.StreamReader:
        """What it writes, to stderr too; only where it was started for that."""
        assert self._process.stdout is not None
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self._process.stdout)
        return reader

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if not self.ended.done():
            os.kill(self.pid, number)

    async def end(self, grace_seconds: float) -> None:
        """End it: SIGTERM, and after `grace_seconds` SIGKILL."""
        self.signal(signal.SIGTERM)
        await asyncio.wait((self.ended,), timeout=grace_seconds)
        self.signal(signal.SIGKILL)
        await asyncio.wait((self.ended,))  # does not cancel it, as awaiting it would

    def has_ended(self, code: int) -> None:
        """Its exit code is known."""
        self._process.returncode = code
        self.ended.set_result(code)


class Children:
    """Those of the running event loop, and what this process has adopted."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._bury)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        when_parent_dies: signal.Signals,
        is_told: bool = False,
        is_heard: bool = False,
    ) -> Child:
        """A process of its own group: signals to this one's group are for this one to pass on.

        Args:
            is_told: it has a stdin, for `Child.tell`.
            is_heard: its output is for `Child.output`, not for the user.
        """
        process = subprocess.Popen(  # noqa: S603 -- the launcher's own command lines
            command,
            env=environment,
            stdin=subprocess.PIPE if is_told else subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_heard else None,
            stderr=subprocess.STDOUT if is_heard else None,
            process_group=0,
            preexec_fn=at_start_of_child(when_parent_dies),
        )
        child = self._children[process.pid] = Child(process)
        return child

    def _bury(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there is no child at all
            while (buried := os.waitpid(-1, os.WNOHANG))[0]:
                child = self._children.pop(buried[0], None)
                if child is not None:  # else an orphan
                    child.has_ended(os.waitstatus_to_exitcode(buried[1]))
