"""The process from which sandboxes are forked, started once by each host process, and the supervisor of each.

host  -- settings, connection -->  fork server  -- fork -->  supervisor  -- fork -->  first process of a sandbox

It never reads a program or its input, which go over the connection to the sandbox, so that nothing of one sandbox is in
the memory of the next. It ends when the host ends or closes its socket; each supervisor has a connection of its own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from typing import NoReturn

from megarl.sandbox.guest.channel import Limits, write_reply
from megarl.sandbox.guest.confine import confine, limit_resources
from megarl.sandbox.guest.runner import CHANNEL, Runner
from megarl.sandbox.guest.seccomp import PR_SET_PDEATHSIG, build_filter, prctl
from megarl.sandbox.launcher.containers import (
    KERNEL_BYTES,
    KERNEL_PROCESSES,
    STDIN,
    bubblewrap_command,
    runsc_command,
    write_bundle,
)
from megarl.sandbox.launcher.isolation import (
    ControlGroup,
    enter_namespaces,
    enter_root,
    enter_user_namespace,
    remove_stale_groups,
)

ERRORS = 2
MAX_ERROR_BYTES = 4096
PR_SET_CHILD_SUBREAPER = 36
RUNSC_EXTRA = {"extra_bytes": KERNEL_BYTES, "extra_processes": KERNEL_PROCESSES}


def supervise(
    tier: str, limits: Limits, readable: Sequence[str], program: str | None, channel: int, lifeline: int
) -> NoReturn:
    """Run one sandbox in a forked process, until the host closes `lifeline` or the sandbox ends; then end this process.

    Args:
        tier: `bubblewrap`, `launcher`, `runsc`, or `unsafe`, which has no sandbox and only limits resources.
        limits: limits of the sandbox.
        readable: files and folders of the host that programs may read.
        program: path of bubblewrap or runsc.
        channel: socket of the connection between host and runner.
        lifeline: socket to the host, which gets one message with what the first process wrote about a failure.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.setsid()
    errors, errors_write = os.pipe()
    first, group = 0, None
    has_users = False
    has_folder = tier in ("unsafe", "runsc")
    folder = tempfile.mkdtemp(prefix=f"megarl-{tier}-") if has_folder else "/"
    try:
        try:
            os.chdir(folder)
            if tier != "unsafe":
                group = ControlGroup.create(limits, **(RUNSC_EXTRA if tier == "runsc" else {}))
                has_users = enter_user_namespace()
                if tier == "launcher":
                    enter_namespaces()
                if tier == "runsc":
                    write_bundle(folder, readable, limits, become_nobody=has_users)
            first = os.fork()
            if first == 0:
                _be_first(tier, limits, readable, program, folder, channel, errors_write, group, has_users)
        except OSError as e:
            os.write(errors_write, f"{e}\n".encode())
        os.close(channel)
        os.close(errors_write)
        if first:
            _wait(first, lifeline)
    finally:
        if group is not None:
            group.remove()
        if has_folder:
            shutil.rmtree(folder, ignore_errors=True)
    text = os.read(errors, MAX_ERROR_BYTES).decode("utf-8", "replace")
    with contextlib.suppress(OSError):  # the host has closed its end
        write_reply(lifeline, {"errors": text.strip(), "cpu_seconds": _cpu_seconds()})
    os._exit(0)


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of all that it has waited for; `os.times` counts in 10 ms."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _be_first(
    tier: str,
    limits: Limits,
    readable: Sequence[str],
    program: str | None,
    folder: str,
    channel: int,
    errors: int,
    group: ControlGroup | None,
    has_users: bool,
) -> NoReturn:
    """Become the first process of the sandbox; a failure is written to `errors`."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if group is not None:
            group.join()
        os.dup2(errors, ERRORS)
        os.dup2(channel, CHANNEL)
        os.closerange(CHANNEL + 1, 1024)
        if tier == "bubblewrap":
            assert program is not None
            command = bubblewrap_command(program, readable, limits, channel=CHANNEL, become_nobody=has_users)
            os.set_inheritable(CHANNEL, True)
            os.execve(program, command, {})  # noqa: S606
        if tier == "runsc":
            assert program is not None
            os.dup2(CHANNEL, STDIN)
            os.execve(program, runsc_command(program, folder), {})  # noqa: S606
        if tier == "launcher":
            enter_root(readable, limits)
            confine(limits, readable=readable, become_nobody=has_users)
        else:
            limit_resources(limits)
        gc.freeze()
        Runner(CHANNEL, limits, is_init=tier == "launcher").serve()
    except Exception as e:  # noqa: BLE001 -- reported to the host
        os.write(ERRORS, f"{e}\n".encode())
    finally:
        os._exit(1)
    raise AssertionError


def _wait(first: int, lifeline: int) -> None:
    """Wait until the first process ends, or kill it when the host closes its end; then end all that is left of it.

    Of bubblewrap, the first process's child outlives it for a moment; without a pid namespace, programs do.
    """
    pidfd = os.pidfd_open(first)
    ready, _, _ = select.select([pidfd, lifeline], [], [])
    if pidfd not in ready:
        os.kill(first, signal.SIGKILL)
    os.close(pidfd)
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    """Return the children of this process, which adopts all orphans of its sandbox."""
    pid = os.getpid()
    with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]
    found = []  # a kernel without CONFIG_PROC_CHILDREN
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == pid:
                found.append(int(name))
    return found


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
