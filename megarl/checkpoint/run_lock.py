"""The lock of a run folder, `<run_dir>/lock`: at most one process may write into the folder.

    free                    hard-link a complete file to the name, which fails if the name exists
    held by a dead process  flock the existing file, check that it is still the one found dead, then replace it

If two processes find the same dead holder, flock serializes them, and the second finds the file replaced.

A process that is suspended for long counts as dead and loses the lock. Writers therefore call `require_lock` before
each write. The controller and the workers of a run write for its driver, which holds the lock: they adopt the driver's
`LockClaim`. A writer that is suspended between the check and the end of its write can still complete that one write:
file systems offer no compare-and-write.
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

from megarl.errors import ConfigError, DataError, LostLockError

LOCK = "lock"

HEARTBEAT = "heartbeat.json"
"""File that a live run rewrites regularly; its modification time counts as a sign of life."""

TOUCH_SECONDS = 30.0
"""Interval at which the holder updates the modification time of the lock."""

LOCK_TIMEOUT_SECONDS = 120.0
"""A holder on another node counts as dead after this time without a sign of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """The process that holds a lock, as recorded in the lock file."""

    host: str
    machine: str
    """Boot id of the kernel and PID namespace: the scope in which `pid` is unique."""
    pid: int
    started: int
    """Start of the process in clock ticks after boot; distinguishes it from later processes with the same pid."""
    command: str
    since: str
    """Time of acquisition in UTC, ISO 8601."""
    token: str
    """Random identifier of this acquisition."""

    @classmethod
    def this_process(cls) -> Self:
        """Describe the calling process."""
        started = _process_start_time(os.getpid())
        assert started is not None
        return cls(
            host=socket.gethostname(),
            machine=_boot_and_pid_namespace(),
            pid=os.getpid(),
            started=started,
            command=shlex.join(sys.argv),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            token=secrets.token_hex(8),
        )


_ADAPTER = TypeAdapter(LockHolder)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockClaim:
    """An acquisition of a run folder's lock as plain data, for processes that write for the holder."""

    run_dir: str
    token: str


_tokens: dict[Path, str] = {}
"""Run folder -> token of its last acquisition by this process, or by the process that this one writes for."""


def adopt_claim(claim: LockClaim) -> None:
    """Let this process write for the holder of the lock: `require_lock` then checks the holder's claim."""
    _tokens[Path(claim.run_dir).absolute()] = claim.token


def find_claim(run_dir: str | Path) -> LockClaim | None:
    """Return this process's claim to the folder, still valid or not; None if it never had one."""
    token = _tokens.get(Path(run_dir).absolute())
    return None if token is None else LockClaim(run_dir=str(run_dir), token=token)


def require_lock(run_dir: str | Path) -> None:
    """Return if this process still has the lock that it acquired or adopted, or if it never had one.

    Raises as `require_claim` does.
    """
    require_claim(find_claim(run_dir))


def require_claim(claim: LockClaim | None) -> None:
    """Return if the lock is still held by this claim, or if there is none.

    Raises:
        LostLockError: another process has taken over the folder, or the lock was released.
        DataError: the lock cannot be read.
    """
    if claim is None:
        return
    run_dir, path = claim.run_dir, Path(claim.run_dir) / LOCK
    try:
        content = _read_if_exists(path)
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}") from e
    holder = None if content is None else _parse(content)
    if holder is None or holder.token != claim.token:
        who = "no process" if content is None else _describe(holder)
        raise LostLockError(
            f"run_dir {run_dir} no longer belongs to this run: {who} holds it now. A run that is suspended for longer "
            f"than {LOCK_TIMEOUT_SECONDS:g} s can lose its folder to another one. This run ends without writing more; "
            "follow the other one, or resume from a checkpoint with another run_dir"
        )


class RunLock:
    """Exclusive right of this process to write into a run folder.

    with RunLock("runs/demo"):
        ...  # no other process holds the lock
    """

    def __init__(self, run_dir: str | Path) -> None:
        """Set the lock path; the disk is not accessed."""
        self._run_dir, self._path = Path(run_dir), Path(run_dir) / LOCK
        self._mine: bytes | None = None
        self._released = threading.Event()

    def acquire(self) -> None:
        """Acquire the lock and start a thread that touches it every `TOUCH_SECONDS`.

        Raises:
            ConfigError: another process holds the lock, or the folder cannot be locked. The folder is unchanged.
        """
        assert self._mine is None, self._path
        with _reporting_lock_errors(self._run_dir):
            self.require_free(time.time())
            self._run_dir.mkdir(parents=True, exist_ok=True)
            holder = LockHolder.this_process()
            content = json.dumps(asdict(holder)).encode()
            draft = self._run_dir / f".{LOCK}.{secrets.token_hex(8)}"
            draft.write_bytes(content)
            try:
                # time of the file system: the clock of a file server may differ from the local one
                while not self._try_acquire(draft, draft.stat().st_mtime):
                    pass
            finally:
                draft.unlink(missing_ok=True)
        self._mine = content
        adopt_claim(LockClaim(run_dir=str(self._run_dir), token=holder.token))
        self._released.clear()
        threading.Thread(target=self._touch, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock if this object still holds it."""
        if self._mine is None:
            return
        self._released.set()
        with _reporting_lock_errors(self._run_dir), _exclusive(self._path):
            if self.is_held():
                self._path.unlink()
        self._mine = None

    def is_held(self) -> bool:
        """Whether this object still holds the lock; a process that was suspended for long may have lost it."""
        return self._mine is not None and _read_if_exists(self._path) == self._mine

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _try_acquire(self, draft: Path, now: float) -> bool:
        """Try once to make `draft` the lock file; False: the caller has to retry."""
        try:
            os.link(draft, self._path)
        except FileExistsError:
            pass
        else:
            return True
        dead = self.require_free(now)
        with _exclusive(self._path) as exists:
            if not exists or dead is None or _read_if_exists(self._path) != dead:
                return False
            self.require_free(now)  # the holder may have touched the lock in the meantime
            draft.replace(self._path)
        return True

    def require_free(self, now: float) -> bytes | None:
        """Return the content of a dead holder's lock file, None if there is no lock; raise if the holder is alive."""
        content = _read_if_exists(self._path)
        if content is None:
            return None
        holder = _parse(content)
        if _is_live(self._run_dir, holder, now):
            raise ConfigError(
                f"run_dir {self._run_dir} is in use by {_describe(holder)}: wait for it, end it, or choose another "
                "run_dir"
            )
        return content

    def _touch(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            with suppress(
                OSError
            ):  # a network file system may be unavailable for a while; the next touch may be in time
                if not self.is_held():
                    return
                with _exclusive(self._path) as exists:
                    if exists and self.is_held():
                        os.utime(self._path)


def find_live_holder(run_dir: str | Path) -> LockHolder | None:
    """Return the live holder of the run's lock; None if there is none or the lock file is malformed.

    Raises:
        ConfigError: the lock cannot be read.
    """
    with _reporting_lock_errors(Path(run_dir)):
        content = _read_if_exists(Path(run_dir) / LOCK)
        holder = None if content is None else _parse(content)
        return holder if holder is not None and _is_live(Path(run_dir), holder, time.time()) else None


def _is_live(run_dir: Path, holder: LockHolder | None, now: float) -> bool:
    if holder is not None and holder.machine == _boot_and_pid_namespace() and holder.host == socket.gethostname():
        return _is_alive(holder)
    modified_at = []
    for name in (LOCK, HEARTBEAT):
        try:
            modified_at.append((run_dir / name).stat().st_mtime)
        except FileNotFoundError:
            continue
    return any(now - time_ < LOCK_TIMEOUT_SECONDS for time_ in modified_at)


def _boot_and_pid_namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _is_alive(holder: LockHolder) -> bool:
    """Whether a holder of this node is alive."""
    started = _process_start_time(holder.pid)
    if started is not None:
        return started == holder.started
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # /proc hides processes of other users: the start time is unknown
    return False  # zombie


def _process_start_time(pid: int) -> int | None:
    """Return when a process of this node started, in clock ticks after boot; None if it is dead or not visible."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _parse(content: bytes) -> LockHolder | None:
    """Parse a lock file; None if it is malformed."""
    try:
        return _ADAPTER.validate_json(content)
    except ValidationError:
        return None


def _describe(holder: LockHolder | None) -> str:
    """Name the holder for messages; `holder`: None if the lock file is malformed."""
    return f"pid {holder.pid} on host {holder.host} since {holder.since}" if holder else "another process"


def _read_if_exists(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Hold flock on the file within the block; yields False, without a lock, if the file does not exist."""
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
def _reporting_lock_errors(run_dir: Path) -> Iterator[None]:
    """Convert OSError in the block to ConfigError."""
    try:
        yield
    except OSError as e:
        unsupported = e.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)
        why = "its file system needs hard links and flock" if unsupported else e.strerror
        raise ConfigError(f"run_dir {run_dir} cannot be locked: {why}") from e
