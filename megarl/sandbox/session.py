"""The host's end of the sandboxes of this machine: the fork server that starts them, and the connection to each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

from megarl.errors import SandboxError
from megarl.sandbox.guest.channel import LENGTH, Limits, encode_request

CLOSE_SECONDS = 30.0
"""Timeout in seconds for the processes of a killed sandbox to exit."""


class ReplyBuffer:
    """Splits bytes that arrive in pieces into replies."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: length of the longest reply."""
        self._data, self._max_bytes = bytearray(), max_bytes

    def add(self, data: bytes) -> None:
        """Append bytes that have arrived."""
        self._data += data

    def next(self) -> dict[str, Any] | None:
        """Return the next whole reply; None where more bytes are needed.

        Raises:
            ValueError: the reply is too long, or no JSON object.
        """
        if len(self._data) < LENGTH.size:
            return None
        length = LENGTH.unpack_from(self._data)[0]
        if length > self._max_bytes:
            raise ValueError(f"a reply needs to have at most {self._max_bytes} bytes, got {length}")
        if len(self._data) < LENGTH.size + length:
            return None
        body = bytes(self._data[LENGTH.size : LENGTH.size + length])
        del self._data[: LENGTH.size + length]
        try:
            reply = json.loads(body)
        except RecursionError as e:
            raise ValueError("a reply is nested too deeply") from e
        if not isinstance(reply, dict):
            raise ValueError(f"a reply needs to be a JSON object, got {type(reply).__name__}")  # noqa: TRY004
        return reply


class Session:
    """A sandbox that is running. Its requests block; one thread uses it at a time."""

    def __init__(self, channel: socket.socket, lifeline: socket.socket, *, max_reply_bytes: int) -> None:
        self._channel, self._lifeline = channel, lifeline
        self._replies = ReplyBuffer(max_reply_bytes)
        self._errors: str | None = None
        self._is_closed = False
        self.cpu_seconds = 0.0
        """CPU time of all processes of the sandbox, in seconds; known when it is closed."""

    def send(self, *requests: dict[str, Any], seconds: float) -> None:
        """Send requests; see `Runner.serve` for their kinds.

        Raises:
            TimeoutError: the sandbox did not take it in time.
            EOFError: the sandbox has ended.
        """
        try:
            self._channel.settimeout(seconds)
            self._channel.sendall(b"".join(map(encode_request, requests)))
        except TimeoutError:
            raise
        except OSError as e:
            raise EOFError from e

    def receive(self, *, seconds: float) -> dict[str, Any]:
        """Return the next reply.

        Raises:
            TimeoutError: it did not arrive in time.
            EOFError: the sandbox has ended.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                reply = self._replies.next()
            except ValueError as e:
                raise EOFError from e
            if reply is not None:
                return reply
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                self._channel.settimeout(left)
                data = self._channel.recv(64 * 1024)
            except TimeoutError:
                raise
            except OSError as e:
                raise EOFError from e
            if not data:
                raise EOFError
            self._replies.add(data)

    def close(self) -> str | None:
        """Kill the sandbox, wait until nothing of it is left, and return what it wrote about a failure.

        Empty: there was no failure. None: its supervisor was lost, so that the reason of its end is not known.

        Raises:
            SandboxError: its processes have not ended in time.
        """
        if self._is_closed:
            return self._errors
        self._is_closed = True
        self._channel.close()
        try:
            self._lifeline.shutdown(socket.SHUT_WR)
            self._lifeline.settimeout(CLOSE_SECONDS)
            message = _read_reply(self._lifeline)
            if message is not None:
                self._errors, self.cpu_seconds = str(message["errors"]), float(message["cpu_seconds"])
        except TimeoutError as e:
            raise SandboxError(f"the processes of a sandbox did not end within {CLOSE_SECONDS:g} s") from e
        except OSError:
            pass  # as if it had ended without a message
        finally:
            self._lifeline.close()
        return self._errors


def _read_reply(connection: socket.socket) -> dict[str, Any] | None:
    """Return the only message of a connection that has a timeout; None if it ends without one.

    Raises:
        TimeoutError: it did not arrive in time.
    """
    buffer = ReplyBuffer(max_bytes=64 * 1024)
    while True:
        if (message := buffer.next()) is not None:
            return message
        data = connection.recv(4096)
        if not data:
            return None
        buffer.add(data)


START_SECONDS = 30.0
"""Time in which a fork server, or a sandbox, starts on a busy machine."""

PACKAGES = Path(__file__).resolve().parents[2]
"""Folder with the package `megarl`."""

LIBRARY_FOLDERS = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
PROGRAMS = {"bubblewrap": "bwrap", "runsc": "runsc"}
"""Tier -> program that it needs."""

MESSAGE_OVERHEAD = 4096
BYTES_OF_ESCAPE = 6
"""Bytes of a character in JSON, at most."""


class ForkServer:
    """A fork server and the connection to it; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the fork server; None while it does not run."""
        return None if self._process is None else self._process.pid

    def start(self, tier: str, limits: Limits) -> Session:
        """Start a sandbox and return its session, which is ready for requests.

        Args:
            tier: `bubblewrap`, `launcher`, `runsc` or `unsafe`.
            limits: limits of the sandbox.

        Raises:
            SandboxError: it did not start; the message has the reason.
        """
        settings = {
            "tier": tier,
            "limits": limits.as_dict(),
            "readable": readable_paths(),
            "program": shutil.which(PROGRAMS[tier]) if tier in PROGRAMS else None,
        }
        host_channel, channel = socket.socketpair()
        host_lifeline, lifeline = socket.socketpair()
        with channel, lifeline:
            self._send(json.dumps(settings).encode(), [channel.fileno(), lifeline.fileno()])
        max_bytes = MESSAGE_OVERHEAD + 3 * BYTES_OF_ESCAPE * (limits.output_bytes + 1)
        session = Session(host_channel, host_lifeline, max_reply_bytes=max_bytes)
        try:
            session.receive(seconds=START_SECONDS)
        except (EOFError, TimeoutError) as e:
            errors = session.close()
            reason = errors or ("it did not start in time" if isinstance(e, TimeoutError) else "its process ended")
            raise SandboxError(f"cannot start a sandbox of tier {tier}: {reason}") from e
        return session

    def close(self) -> None:
        """End the fork server; sandboxes that it has started live until their sessions are closed."""
        with self._lock:
            self._stop()

    def _send(self, data: bytes, fds: list[int]) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()
            control = self._control or self._launch()
            try:
                socket.send_fds(control, [data], fds)
            except OSError as e:
                self._stop()
                raise SandboxError(f"the fork server of sandboxes has ended: {e}") from e

    def _launch(self) -> socket.socket:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start = (
            f"import sys; sys.path.insert(0, {str(PACKAGES)!r}); import socket; "
            "from megarl.sandbox.launcher.fork_server import serve; del sys.path[0]; "
            "serve(socket.socket(fileno=int(sys.argv[1])))"
        )
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 -- this Python
                [python_path(), "-s", "-S", "-P", "-c", start, str(theirs.fileno())],
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = control
        control.settimeout(START_SECONDS)
        try:
            ready = control.recv(1)
        except OSError:
            ready = b""
        if not ready:
            self._stop()
            raise SandboxError(f"the fork server of sandboxes did not start with {python_path()}")
        return control

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(START_SECONDS)
            self._process.kill()
            self._process.wait()
            self._process = None


def python_path() -> str:
    """Return the path of this interpreter outside of virtual environments, which programs run with too."""
    return os.path.realpath(sys.executable)


def readable_paths() -> list[str]:
    """Return what programs may read of the host: the interpreter, its standard library, and shared libraries."""
    library = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    paths = [path for path in LIBRARY_FOLDERS if os.path.lexists(path)]
    platform_library = sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})
    others = [sysconfig.get_path("stdlib"), platform_library, python_path()]
    if all(library) and os.path.exists(os.path.join(*library)):
        others.append(os.path.realpath(os.path.join(*library)))
    for path in map(os.path.realpath, others):
        if not any(path == parent or path.startswith(f"{os.path.realpath(parent)}/") for parent in paths):
            paths.append(path)
    return paths
