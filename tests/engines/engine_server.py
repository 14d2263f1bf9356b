"""The process from which tests fork processes that use SGLang: it has imported SGLang once for all of them.

Run as `python engine_server.py <socket>`. Each connection starts one process: its environment variables, its main
function and the arguments arrive, its pid is sent back, and its exit code once it has ended. The server ends when its
standard input closes, which it does with the process that started it.
"""

import fcntl
import gc
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import util
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import NoReturn

from megarl.cluster.process.process_start import fast_imports
from tests.time_limits import wait_until

AUTHKEY = b"tests"


class ForkedProcess:
    """A process forked from the server, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, server: str, environment: dict[str, str], main: Callable[..., None], *arguments: str) -> None:
        """`main`: the process imports it by its name."""
        self.returncode: int | None = None
        self._connection = Client(server, authkey=AUTHKEY)
        self._connection.send((environment, main, arguments))
        self.pid: int = self._connection.recv()

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None and self._connection.poll():
            self.returncode = self._connection.recv()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it did not end within `timeout` seconds.
        """
        if self.returncode is None and not self._connection.poll(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_server(folder: str, environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server; return its process and the address of its socket, which is in `folder`."""
    address = f"{folder}/server"
    server = subprocess.Popen([sys.executable, "-P", __file__, address], env=environment, stdin=subprocess.PIPE)
    started = wait_until(lambda: server.poll() is not None or Path(address).exists())
    assert server.poll() is None, "the server has ended"
    assert started, "the server did not start in time"
    return server, address


def serve(address: str) -> None:
    """Fork a process for each connection until standard input closes."""
    with Listener(address, authkey=AUTHKEY) as listener, selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        accepting = listener._listener._socket  # type: ignore[attr-defined] # a Listener has no fileno of its own
        selector.register(accepting, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is accepting:
                    pid, connection = fork(listener)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
                else:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    report_end(*key.data)


def fork(listener: Listener) -> tuple[int, Connection]:
    """Start the process of the next connection; return its pid and the connection."""
    connection = listener.accept()
    environment, main, arguments = connection.recv()
    pid = os.fork()
    if pid == 0:
        run(environment, main, arguments)
    connection.send(pid)
    return pid, connection


def run(environment: dict[str, str], main: Callable[..., None], arguments: Sequence[str]) -> NoReturn:
    """Call the main function of a forked process, and end the process."""
    os.environ.clear()
    os.environ.update(environment)
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
    code = 1
    try:
        main(*arguments)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def prefork_scheduler_server() -> None:
    """Fork the process from which multiprocessing forks the schedulers of this engine.

    multiprocessing would execute Python for it, which imports SGLang once more. The fork waits for what its command
    line would have: the process of an engine has threads when it starts the server.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        become_scheduler_server(theirs)
    theirs.close()
    execute = util.spawnv_passfds

    def start(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in arguments[-1]:
            return execute(path, arguments, descriptors)
        util.spawnv_passfds = execute  # a later server of this engine is executed
        with ours:
            socket.send_fds(ours, [b"."], descriptors)
            ours.sendall(pickle.dumps((arguments[-1], list(descriptors), dict(os.environ))))
        return pid

    util.spawnv_passfds = start


def become_scheduler_server(starter: socket.socket) -> NoReturn:
    """Wait for the code, file descriptors and environment of the server, and run it; end if the engine ends before."""
    _, received, _, _ = socket.recv_fds(starter, 1, 8)
    if not received:
        os._exit(0)
    with starter, starter.makefile("rb") as file:
        code, numbers, environment = pickle.load(file)
    # first to numbers that no descriptor has, since one may have the number of another
    free = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(*numbers, *received) + 1) for descriptor in received]
    for descriptor, number in zip(free, numbers, strict=True):
        os.dup2(descriptor, number)
    for descriptor in {*free, *received} - set(numbers):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    with suppress(SystemExit):
        exec(code, {})
    os._exit(0)


def report_end(pid: int, connection: Connection) -> None:
    """Send the exit code of a process that has ended, unless its client is gone."""
    _, status = os.waitpid(pid, 0)
    with connection, suppress(BrokenPipeError):
        connection.send(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    with fast_imports():
        import sglang.srt.entrypoints.engine  # noqa: F401 -- imported for the forked processes

        from megarl.engines.sglang.weight_layout import trace_child  # noqa: F401
        from tests.engines import engine_process  # noqa: F401
    gc.freeze()  # a garbage collection in a forked process would otherwise copy the pages that it shares
    serve(sys.argv[1])
