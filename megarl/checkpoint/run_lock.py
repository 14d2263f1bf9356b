"""Whose a run's folder is: `<run_dir>/lock`, of which there is one.

    nobody holds it       a file that is complete is linked to the name, which fails where there is one
    a dead process does   flock on the file that is there; is it still the one that was judged? then it is replaced

Two that find the same dead holder wait for each other at its file, and the second finds it replaced.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter, ValidationError

from megarl.errors import ConfigError

LOCK = "lock"

HEARTBEAT = "heartbeat.json"
"""Written by a run that is alive; its time counts."""

TOUCH_SECONDS = 30.0
SILENT_SECONDS = 120.0
"""A holder on another machine that gives no sign for so long is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process, as its lock describes it."""

    host: str
    machine: str
    """Where its process id means something: the boot of a kernel, and the namespace there."""
    pid: int
    started: int
    """In clock ticks after the boot: process ids are used again."""
    command: str
    since: str
    """UTC, as ISO 8601."""
    token: str
    """Of this one lock."""

    @classmethod
    def this_process(cls) -> Self:
        """The caller."""
        started = _start_of(os.getpid())
        assert started is not None
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=started,
            command=shlex.join(sys.argv),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            token=secrets.token_hex(8),
        )


_ADAPTER = TypeAdapter(Holder)


class RunLock:
    """This process's right to write into a run's folder.

    with RunLock("runs/demo"):
        ...  # no other process has it
    """

    def __init__(self, run_dir: str | Path) -> None:
        """Touches nothing."""
        self._run_dir, self._path = Path(run_dir), Path(run_dir) / LOCK
        self._mine: bytes | None = None
        self._released = threading.Event()

    def acquire(self) -> None:
        """Take the lock, and give a sign every `TOUCH_SECONDS` from then on.

        Raises:
            ConfigError: another process has it, or the folder cannot be locked. Nothing in it has changed.
        """
        assert self._mine is None, self._path
        with _locking(self._run_dir):
            self._require_free(time.time())
            self._run_dir.mkdir(parents=True, exist_ok=True)
            content = json.dumps(asdict(Holder.this_process())).encode()
            draft = self._run_dir / f".{LOCK}.{secrets.token_hex(8)}"
            draft.write_bytes(content)
            try:
                # the file's time, as the clock of a server may differ from this machine's
                while not self._take(draft, draft.stat().st_mtime):
                    pass
            finally:
                draft.unlink(missing_ok=True)
        self._mine = content
        self._released.clear()
        threading.Thread(target=self._touch, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Give the lock back, if it is still this one's."""
        if self._mine is None:
            return
        self._released.set()
        with _locking(self._run_dir), _alone(self._path):
            if self.is_held():
                self._path.unlink()
        self._mine = None

    def is_held(self) -> bool:
        """Whether it is this one's: a process that was stopped for long may have lost it."""
        return self._mine is not None and _content(self._path) == self._mine

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _take(self, draft: Path, now: float) -> bool:
        """Whether the draft has become the lock; else it is to be tried again."""
        try:
            os.link(draft, self._path)
        except FileExistsError:
            pass
        else:
            return True
        judged = self._require_free(now)
        with _alone(self._path) as is_there:
            if not is_there or judged is None or _content(self._path) != judged:
                return False
            self._require_free(now)  # it may have given a sign meanwhile
            draft.replace(self._path)
        return True

    def _require_free(self, now: float) -> bytes | None:
        """What the lock holds, the holder being dead; None where there is no lock."""
        content = _content(self._path)
        if content is None:
            return None
        holder = _parse(content)
        if _lives(self._run_dir, holder, now):
            who = f"pid {holder.pid} on host {holder.host} since {holder.since}" if holder else "another process"
            raise ConfigError(
                f"run_dir {self._run_dir} is in use by {who}: wait for it, end it, or choose another run_dir"
            )
        return content

    def _touch(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            with suppress(OSError):  # a network's disk may be away for a while; the next sign may come in time
                if not self.is_held():
                    return
                with _alone(self._path) as is_there:
                    if is_there and self.is_held():
                        os.utime(self._path)


def live_holder(run_dir: str | Path) -> Holder | None:
    """Who has the run's lock and is alive; None: nobody, or nobody whose name can be read.

    Raises:
        ConfigError: the lock cannot be read.
    """
    with _locking(Path(run_dir)):
        content = _content(Path(run_dir) / LOCK)
        holder = None if content is None else _parse(content)
        return holder if holder is not None and _lives(Path(run_dir), holder, time.time()) else None


def _lives(run_dir: Path, holder: Holder | None, now: float) -> bool:
    if holder is not None and holder.machine == _machine() and holder.host == socket.gethostname():
        return _is_alive(holder)
    signs = []
    for name in (LOCK, HEARTBEAT):
        try:
            signs.append((run_dir / name).stat().st_mtime)
        except FileNotFoundError:
            continue
    return any(now - sign < SILENT_SECONDS for sign in signs)


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _is_alive(holder: Holder) -> bool:
    """Of one on this machine."""
    started = _start_of(holder.pid)
    if started is not None:
        return started == holder.started
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # /proc hides other users' processes: nothing more is known of it
    return False  # a zombie


def _start_of(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks after the boot; None where none is seen alive."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _parse(content: bytes) -> Holder | None:
    """None: it is no lock of ours."""
    try:
        return _ADAPTER.validate_json(content)
    except ValidationError:
        return None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether the file is there; in the block, no other process is in this block for the same file."""
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield True
    finally:
        os.close(handle)


@contextmanager
def _locking(run_dir: Path) -> Iterator[None]:
    """What the file system refuses, as a sentence."""
    try:
        yield
    except OSError as e:
        unable = e.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)
        why = "its file system needs hard links and flock" if unable else e.strerror
        raise ConfigError(f"run_dir {run_dir} cannot be locked: {why}") from e
