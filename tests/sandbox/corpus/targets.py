"""What the programs of the corpus look for: a secret of the host in files, variables, memory, sockets and processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

VARIABLE = "MEGARL_CANARY"


class Targets:
    """The secret `canary` and where it is; `places` names those without the secret."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.canary = f"canary-{secrets.token_hex(16)}"
        self._folder, self._stack = folder, stack
        folder.chmod(0o755)
        file, self.writable = folder / "secret", folder / "writable"
        file.write_text(self.canary)
        file.chmod(0o644)
        self._shm = Path("/dev/shm") / f"megarl-corpus-{os.getpid()}"
        stack.callback(self._shm.unlink, missing_ok=True)
        self.fd = os.open(file, os.O_RDONLY)
        stack.callback(os.close, self.fd)
        self._memory = ctypes.create_string_buffer(self.canary.encode())
        self.marker = f"megarl-corpus-{secrets.token_hex(8)}"
        self._victim: subprocess.Popen[bytes] | None = None
        os.environ[VARIABLE] = self.canary
        stack.callback(os.environ.pop, VARIABLE, None)
        stack.callback(self._end_victim)
        self.places: dict[str, object] = {
            "file": str(file),
            "folder": str(folder),
            "writable": str(self.writable),
            "shm": str(self._shm),
            "fd": self.fd,
            "host": os.getpid(),
            "address": ctypes.addressof(self._memory),
            "hostname": socket.gethostname(),
            "marker": self.marker,
            "tcp": self._serve(socket.AF_INET, ("127.0.0.1", 0))[1],
            "tcp6": self._serve(socket.AF_INET6, ("::1", 0))[1] if _has_v6() else 1,
            "unix": self._serve(socket.AF_UNIX, str(folder / "socket")),
            "abstract": f"megarl-corpus-{os.getpid()}",
            "udp": self._serve_udp(),
            "http": self._serve(socket.AF_INET, ("127.0.0.1", 0), b"HTTP/1.0 200 OK\r\n\r\n")[1],
            "shm_key": self._share(),
        }
        self._serve(socket.AF_UNIX, f"\0{self.places['abstract']}")
        self.prepare()

    def prepare(self) -> None:
        """Restore what a program may have changed."""
        self.writable.write_text("unchanged")
        self.writable.chmod(0o666)
        self._shm.write_text(self.canary)  # Python's multiprocessing deletes what it has opened
        (self._folder / "hard").unlink(missing_ok=True)
        (self._folder / "created").unlink(missing_ok=True)
        if self._victim is None or self._victim.poll() is not None:
            command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()", self.marker]
            self._victim = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.places["victim"] = self._victim.pid

    def find_change(self) -> str | None:
        """Return what a program has changed on the host; None: nothing."""
        assert self._victim is not None
        if self._victim.poll() is not None:
            return "the process of the host has ended"
        if not self.writable.exists() or self.writable.read_text() != "unchanged":
            return "the file of the host has changed"
        if (self._folder / "hard").exists() or (self._folder / "created").exists():
            return "a file has been created"
        return None

    def _end_victim(self) -> None:
        if self._victim is not None:
            self._victim.kill()
            self._victim.communicate()

    def _serve(self, family: int, address: object, http: bytes = b"") -> object:
        """Send the secret to each client; after its request, behind the head `http`, if there is one."""
        server = socket.socket(family)
        server.bind(address)
        server.listen()
        if isinstance(address, str) and address.startswith("/"):
            os.chmod(address, 0o777)

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                if http:
                    connection.recv(10_000)
                connection.sendall(http + self.canary.encode())

        self._start(server, greet)
        return address if family == socket.AF_UNIX else server.getsockname()

    def _serve_udp(self) -> int:
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind(("127.0.0.1", 0))
        self._start(server, lambda: server.sendto(self.canary.encode(), server.recvfrom(10)[1]))
        return server.getsockname()[1]

    def _start(self, server: socket.socket, answer: Callable[[], object]) -> None:
        def loop() -> None:
            while True:
                try:
                    answer()
                except OSError:
                    if server.fileno() < 0:
                        return

        threading.Thread(target=loop, daemon=True).start()
        self._stack.callback(server.close)

    def _share(self) -> int:
        """Create a System V segment with the secret, and return its key."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.shmat.restype = ctypes.c_void_p
        key = secrets.randbelow(1 << 30) + 1
        segment = libc.shmget(key, 4096, 0o1644)
        assert segment >= 0, os.strerror(ctypes.get_errno())
        self._stack.callback(libc.shmctl, segment, 0, None)
        address = libc.shmat(segment, None, 0)
        ctypes.memmove(address, self._memory, len(self._memory))
        return key


def _has_v6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def open_targets() -> Iterator[Targets]:
    """Set up the targets, and remove them at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-corpus-")))
        yield Targets(folder, stack)
