"""Holds scheduler processes back after their imports, until the devices have memory for them.

    engine host    |- imports SGLang -|- starts schedulers, waits ------- open ---------------------
    scheduler                          '- imports SGLang -|- wait_at_gate -'- allocates: loads the model
    trainer        |- imports, builds, offloads ---------------------------^

The host holds an exclusive lock on a file, for which schedulers wait; the kernel releases it if the host dies. Only a
GPU can show that SGLang's imports allocate no device memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import fcntl
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import IO

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
