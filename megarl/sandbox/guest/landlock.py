"""Landlock: access rights of a process to files and the network, which no later call can extend.

A second barrier behind the mounts of a sandbox; kernels before 5.13, or without Landlock, have only the mounts.
"""

from __future__ import annotations

import ctypes
import os
import struct

from megarl.sandbox.guest.seccomp import syscall

TYPE_CHECKING = False  # of `typing`, without its import, which delays the start of a sandbox
if TYPE_CHECKING:
    from collections.abc import Sequence

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
