"""The filter of system calls: a program for the kernel's BPF machine that allows what Python programs need.

All other calls fail with EPERM, so that a program gets an exception; calls of another architecture kill it. A process
changes its own limits and priority only, by the id 0: the runner has the same user as its programs. Not allowed are,
among others: socket, ptrace, process_vm_*, mount, unshare, setns, io_uring_*, bpf, keyctl, userfaultfd,
perf_event_open, memfd_create, shmget, name_to_handle_at, open_by_handle_at, chroot and set*id.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from functools import cache

from megarl.sandbox.guest.syscalls import MACHINE, allowed_calls, other_calls, prctl

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Constants of <linux/audit.h>: how the kernel names the architecture of a call."""

ALLOW = 0x7FFF0000
KILL = 0x80000000
EPERM = 0x00050000 | errno.EPERM
ENOSYS = 0x00050000 | errno.ENOSYS

NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET in the flags of clone."""

PRCTL_OPTIONS = (1, 2, 3, 15, 16, 21, 39, 0x53564D41)
"""PDEATHSIG and NAME, set and get; GET_DUMPABLE; GET_SECCOMP; GET_NO_NEW_PRIVS; SET_VMA, which malloc uses."""

IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS (which isatty uses), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""

AF_UNIX = 1
PRIO_PROCESS = 0
X32_CALLS = 0x40000000
"""First number of the calls of the x32 interface, which x86_64 kernels may have under the same architecture."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

Instruction = tuple[int, int, int, int]
"""Code, instructions to skip if true, instructions to skip if false, constant: `struct sock_filter`."""


@cache
def build_filter(machine: str = MACHINE) -> bytes:
    """Return the program, an array of `struct sock_filter`.

    Raises:
        OSError: the architecture is not known.
    """
    if machine not in AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"the filter of system calls needs one of {', '.join(AUDIT_ARCH)}, got {machine}")
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),  # architecture
        (_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, 0),  # number of the call
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, X32_CALLS), (_RETURN, 0, 0, KILL)]
    calls = allowed_calls(machine)
    conditions = {
        "clone": _unless_any_bit(NEW_NAMESPACES),
        "prctl": _if_one_of(PRCTL_OPTIONS, argument=0),
        "ioctl": _if_one_of(IOCTL_REQUESTS, argument=1),
        "socketpair": _if_one_of((AF_UNIX,), argument=0),
        "prlimit64": _if_one_of((0,), argument=0),
        "setpriority": _if_equal(PRIO_PROCESS, 0),
    }
    for name, number in calls.items():
        body = conditions.get(name, [(_RETURN, 0, 0, ALLOW)])
        program += [(_EQUAL, 0, len(body), number), *body]
    # the C library calls clone3 first, whose flags a filter cannot read; it calls clone where clone3 does not exist
    program += [(_EQUAL, 0, 1, other_calls(machine)["clone3"]), (_RETURN, 0, 0, ENOSYS), (_RETURN, 0, 0, EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def install_filter(program: bytes) -> None:
    """Apply the filter to this process and its future children; it needs `no_new_privs`.

    Raises:
        OSError: the kernel refuses it.
    """
    buffer = ctypes.create_string_buffer(program, len(program))
    address = ctypes.cast(buffer, ctypes.c_void_p)

    class _Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    prctl(_PR_SET_SECCOMP, _MODE_FILTER, argument=ctypes.byref(_Program(len(program) // 8, address)))


def _argument(index: int) -> Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index)  # its lower half; both architectures are little-endian


def _if_one_of(values: tuple[int, ...], *, argument: int) -> list[Instruction]:
    tests = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_argument(argument), *tests, (_RETURN, 0, 0, EPERM), (_RETURN, 0, 0, ALLOW)]


def _if_equal(first: int, second: int) -> list[Instruction]:
    """Allow a call that has these two arguments."""
    tests = [_argument(0), (_EQUAL, 0, 2, first), _argument(1), (_EQUAL, 1, 0, second)]
    return [*tests, (_RETURN, 0, 0, EPERM), (_RETURN, 0, 0, ALLOW)]


def _unless_any_bit(bits: int) -> list[Instruction]:
    return [_argument(0), (_ANY_BIT, 0, 1, bits), (_RETURN, 0, 0, EPERM), (_RETURN, 0, 0, ALLOW)]
