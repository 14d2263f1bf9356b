"""Drop privileges, system calls, files and resources for good, before a process runs untrusted programs."""

from __future__ import annotations

import contextlib
import os
import resource
import signal

from megarl.sandbox.guest.landlock import restrict_files
from megarl.sandbox.guest.limits import MIB, Limits
from megarl.sandbox.guest.seccomp import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    build_filter,
    drop_bounding_set,
    drop_capabilities,
    install_filter,
    prctl,
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
