"""A harness that sends its episodes to one long-lived process, so that its framework is imported once.

The process runs in an environment of its own, reads JSON lines and writes JSON lines, as `serve.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

from megarl import environments

MAX_LINE_BYTES = 2**24


async def run(task: environments.Task, base_url: str, api_key: str, *, command: Sequence[str]) -> None:
    """Run an episode in the process of `command`, which is started if it does not run.

    Raises:
        RuntimeError: the program failed, or its process ended.
    """
    async with _starting:
        program = programs.get(tuple(command))
        if program is None or program.has_ended:
            program = programs[tuple(command)] = await Program.start(command)
    request = {"messages": list(task.messages), "seed": task.seed}
    await program.solve({"task": request, "base_url": base_url, "api_key": api_key})


class Program:
    """A running process, and the episodes that wait for its answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Read the answers of the process from now on."""
        self.process = process
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: Sequence[str]) -> Program:
        """Start the process; it ends with this process, as its stdin does."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") and k != "PYTHONPATH"}
        environment = inherited | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=environment, limit=MAX_LINE_BYTES
        )
        return cls(process)

    @property
    def has_ended(self) -> bool:
        """Whether the process gives no more answers."""
        return self._reader.done()

    async def solve(self, request: dict[str, Any]) -> None:
        """Send a request and wait for its answer; a cancelled request is cancelled in the process too.

        Raises:
            RuntimeError: the program failed, or the process ended.
        """
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"id": number, **request})
            await answer
        except asyncio.CancelledError:
            await self._send({"id": number})
            raise
        finally:
            del self._waiting[number]

    async def _send(self, line: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # the process has ended: `_read` says so to all that wait
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            await self.process.stdin.drain()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            answer = json.loads(line)
            waiting = self._waiting.get(answer["id"])
            if waiting is None or waiting.done():
                continue
            if answer["error"] is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(RuntimeError(answer["error"]))
        code = await self.process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(RuntimeError(f"the program ended with exit code {code}"))


programs: dict[tuple[str, ...], Program] = {}
"""The programs that were started, by command."""

_starting = asyncio.Lock()
