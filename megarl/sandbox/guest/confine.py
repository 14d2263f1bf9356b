"""Drop privileges, system calls, files and resources for good, before a process runs untrusted programs.

Landlock grants access rights to files and the network that no later call can extend. It is a second barrier behind the
mounts of a sandbox; kernels before 5.13, or without Landlock, have only the mounts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct

from megarl.sandbox.guest.channel import MIB, Limits
from megarl.sandbox.guest.seccomp import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    build_filter,
    drop_bounding_set,
    drop_capabilities,
    install_filter,
    prctl,
    syscall,
)

TYPE_CHECKING = False  # of `typing`, without its import, which delays the start of a sandbox
if TYPE_CHECKING:
    from collections.abc import Sequence

NOBODY = 65534
"""User and group that programs run as where the sandbox is started by root."""

MAX_OPEN_FILES = 64
RUNNER_BYTES = 64 * MIB
"""Address space of an interpreter before it runs a program; the limit of memory does not count it."""

FOLDER = "/tmp"  # noqa: S108 -- of the sandbox, which has a file system of its own
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))


def _become_nobody() -> None:
    """Change user and group to nobody and leave all other groups."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # changing the user has cleared it


def confine(limits: Limits, *, readable: Sequence[str], become_nobody: bool) -> None:
    """Confine this process and its future children, which are in namespaces and a root folder of their own.

    Args:
        limits: its memory, files and processes; time is limited for each program.
        readable: folders that may be read. `FOLDER` may be written.
        become_nobody: change to the user nobody, whom the user namespace maps.

    Raises:
        OSError: the kernel refuses a step.
    """
    drop_bounding_set()
    if become_nobody:
        _become_nobody()
    drop_capabilities()
    prctl(PR_SET_DUMPABLE, 0)  # programs of the same user cannot open /proc/1/mem, /proc/1/fd and /proc/1/root
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    limit_resources(limits)
    _limit(resource.RLIMIT_NPROC, limits.max_processes)  # counted per user and user namespace since Linux 5.14
    restrict_files(
        [*readable, "/proc", "/dev"], [FOLDER], [*DEVICES, "/proc"]
    )  # each process may write to its /proc/self
    install_filter(build_filter())


def limit_resources(limits: Limits) -> None:
    """Limit memory and files of this process and each of its future children."""
    _limit(resource.RLIMIT_AS, limits.memory_bytes + RUNNER_BYTES)
    _limit(resource.RLIMIT_FSIZE, limits.disk_bytes)
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    for name in ("CORE", "MEMLOCK"):
        _limit(getattr(resource, f"RLIMIT_{name}"), 0)
    with contextlib.suppress(ValueError):  # gVisor, which has no message queues
        _limit(resource.RLIMIT_MSGQUEUE, 0)


def limit_cpu(seconds: int) -> None:
    """Limit the CPU time of this process: SIGXCPU after `seconds`, SIGKILL a second later."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, value))


EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << i for i in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << i for i in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = (1 << i for i in range(13, 16))

READ = EXECUTE | READ_FILE | READ_DIR
WRITE = READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | REFER
WRITE |= REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM
DEVICE = READ_FILE | WRITE_FILE | TRUNCATE
OF_FILES = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV
"""Rights that a rule for a file, rather than a folder, may have."""

FIRST_ABI = {REFER: 2, TRUNCATE: 3, IOCTL_DEV: 5}
"""Version of Landlock that has a right first; version 1 has the others."""

TCP_RIGHTS = 0b11
"""Bind and connect; since version 4."""

SCOPES = 0b11
"""Abstract Unix sockets and signals of processes outside the sandbox; since version 6."""

_RULE_PATH_BENEATH = 1
_CREATE_VERSION = 1


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 without it."""
    try:
        return syscall("landlock_create_ruleset", None, ctypes.c_size_t(0), ctypes.c_uint(_CREATE_VERSION))
    except (OSError, KeyError):
        return 0


def restrict_files(readable: Sequence[str], writable: Sequence[str], devices: Sequence[str] = ()) -> bool:
    """Leave this process and its future children only these folders and devices, and no TCP; needs `no_new_privs`.

    Paths that do not exist are left out. Returns False where the kernel has no Landlock.

    Raises:
        OSError: a call failed.
    """
    version = landlock_version()
    if version < 1:
        return False
    handled = (1 << 16) - 1
    for right, first in FIRST_ABI.items():
        if version < first:
            handled &= ~right
    attributes = struct.pack("=Q", handled)
    if version >= 4:
        attributes += struct.pack("=Q", TCP_RIGHTS)
    if version >= 6:
        attributes += struct.pack("=Q", SCOPES)
    ruleset = syscall("landlock_create_ruleset", attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    try:
        for paths, rights in ((readable, READ), (writable, WRITE), (devices, DEVICE)):
            for path in paths:
                if os.path.exists(path):
                    _add_rule(ruleset, path, rights & handled & (-1 if os.path.isdir(path) else OF_FILES))
        syscall("landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)
    return True


def _add_rule(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, fd)
        syscall("landlock_add_rule", ctypes.c_int(ruleset), ctypes.c_int(_RULE_PATH_BENEATH), rule, ctypes.c_uint(0))
    finally:
        os.close(fd)
