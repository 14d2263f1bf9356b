"""The process from which sandboxes are forked, started once by each host process with an empty environment.

host  -- settings, connection -->  fork server  -- fork -->  supervisor  -- fork -->  first process of a sandbox

It never reads a program or its input, which go over the connection to the sandbox, so that nothing of one sandbox is in
the memory of the next. It ends when the host ends or closes its socket; each supervisor has a connection of its own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket

from megarl.sandbox.guest.limits import Limits
from megarl.sandbox.guest.seccomp import build_filter
from megarl.sandbox.launcher.cgroup import remove_stale_groups
from megarl.sandbox.launcher.supervisor import supervise

MAX_BYTES = 64 * 1024
"""Largest message with settings."""

PRELOADED = (
    "__future__",
    "ast",
    "bisect",
    "cmath",
    "collections",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "inspect",
    "itertools",
    "linecache",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "threading",
    "traceback",
    "typing",
)
"""Modules that programs or `guest.program` often import; they are there after the fork."""


def serve(control: socket.socket) -> None:
    """Fork a supervisor for each message, until the other end of the socket is closed."""
    for name in PRELOADED:
        __import__(name)
    with contextlib.suppress(OSError):  # sandboxes report it
        build_filter()
    remove_stale_groups()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for
    control.sendall(b"1")
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_BYTES, 2)
        if not data:
            return
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                settings = json.loads(data)
                settings["limits"] = Limits(**settings["limits"])
                supervise(**settings, channel=fds[0], lifeline=fds[1])
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
