"""Starts sandboxes on this machine, through a fork server that this process starts once."""

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
from pathlib import Path

from megarl.errors import SandboxError
from megarl.sandbox.guest.limits import Limits
from megarl.sandbox.session import Session

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
