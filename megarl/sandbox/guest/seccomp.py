"""The filter of system calls: a program for the kernel's BPF machine that allows what Python programs need.

All other calls fail with EPERM, so that a program gets an exception; calls of another architecture kill it. A process
changes its own limits and priority only, by the id 0: the runner has the same user as its programs. Not allowed are,
among others: socket, ptrace, process_vm_*, mount, unshare, setns, io_uring_*, bpf, keyctl, userfaultfd,
perf_event_open, memfd_create, shmget, name_to_handle_at, open_by_handle_at, chroot and set*id.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from functools import cache

MACHINE = os.uname().machine
"""Name of the processor architecture, as `uname -m` prints it."""

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38

_CAPABILITY_VERSION_3 = 0x20080522

# name, number on x86_64, number on aarch64; None: the architecture has no such call. Those that programs may make.
_TABLE = """
read 0 63|write 1 64|close 3 57|fstat 5 80|lseek 8 62|mmap 9 222|mprotect 10 226|munmap 11 215|brk 12 214
rt_sigaction 13 134|rt_sigprocmask 14 135|rt_sigreturn 15 139|ioctl 16 29|pread64 17 67|pwrite64 18 68|readv 19 65
writev 20 66|sched_yield 24 124|mremap 25 216|msync 26 227|mincore 27 232|madvise 28 233|dup 32 23|nanosleep 35 101
getitimer 36 102|setitimer 38 103|getpid 39 172|sendfile 40 71|sendto 44 206|recvfrom 45 207|sendmsg 46 211
recvmsg 47 212|shutdown 48 210|getsockname 51 204|getpeername 52 205|socketpair 53 199|setsockopt 54 208
getsockopt 55 209|clone 56 220|execve 59 221|exit 60 93|wait4 61 260|kill 62 129|uname 63 160|fcntl 72 25|flock 73 32
fsync 74 82|fdatasync 75 83|truncate 76 45|ftruncate 77 46|getcwd 79 17|chdir 80 49|fchdir 81 50|fchmod 91 52
umask 95 166|gettimeofday 96 169|getrlimit 97 163|getrusage 98 165|sysinfo 99 179|times 100 153|getuid 102 174
getgid 104 176|geteuid 107 175|getegid 108 177|setpgid 109 154|getppid 110 173|setsid 112 157|getgroups 115 158
getresuid 118 148|getresgid 120 150|getpgid 121 155|getsid 124 156|rt_sigpending 127 136|rt_sigtimedwait 128 137
rt_sigsuspend 130 133|sigaltstack 131 132|statfs 137 43|fstatfs 138 44|getpriority 140 141|setpriority 141 140
sched_getparam 143 121|sched_getscheduler 145 120|sched_get_priority_max 146 125|sched_get_priority_min 147 126
prctl 157 167|gettid 186 178|readahead 187 213|futex 202 98|sched_getaffinity 204 123|getdents64 217 61
set_tid_address 218 96|fadvise64 221 223|clock_gettime 228 113|clock_getres 229 114|clock_nanosleep 230 115
exit_group 231 94|tgkill 234 131|tkill 200 130|waitid 247 95|openat 257 56|mkdirat 258 34|newfstatat 262 79
unlinkat 263 35|renameat 264 38|linkat 265 37|symlinkat 266 36|readlinkat 267 78|fchmodat 268 53|faccessat 269 48
pselect6 270 72|ppoll 271 73|set_robust_list 273 99|get_robust_list 274 100|splice 275 76|sync_file_range 277 84
utimensat 280 88|epoll_pwait 281 22|fallocate 285 47|timerfd_create 283 85|timerfd_settime 286 86
timerfd_gettime 287 87|eventfd2 290 19|epoll_create1 291 20|dup3 292 24|pipe2 293 59|preadv 295 69|pwritev 296 70
prlimit64 302 261|renameat2 316 276|getrandom 318 278|copy_file_range 326 285|preadv2 327 286|pwritev2 328 287
statx 332 291|rseq 334 293|close_range 436 436|faccessat2 439 439|epoll_pwait2 441 441|epoll_ctl 233 21
restart_syscall 219 128|membarrier 324 283|getcpu 309 168|inotify_init1 294 26|signalfd4 289 74|pidfd_open 434 434
pidfd_send_signal 424 424|open 2 -|stat 4 -|lstat 6 -|poll 7 -|access 21 -|pipe 22 -|select 23 -|dup2 33 -|pause 34 -
alarm 37 -|fork 57 -|vfork 58 -|getdents 78 -|rename 82 -|mkdir 83 -|rmdir 84 -|creat 85 -|link 86 -|unlink 87 -
symlink 88 -|readlink 89 -|chmod 90 -|getpgrp 111 -|utime 132 -|arch_prctl 158 -|time 201 -|epoll_create 213 -
epoll_wait 232 -|utimes 235 -|futimesat 261 -|eventfd 284 -
"""

_OTHERS = """
clone3 435 435|mount_setattr 442 442|pivot_root 155 41|landlock_create_ruleset 444 444|landlock_add_rule 445 445
landlock_restrict_self 446 446|capset 126 91|seccomp 317 277
"""


def _parse(table: str, machine: str) -> dict[str, int]:
    column = {"x86_64": 1, "aarch64": 2}.get(machine)
    if column is None:
        return {}
    entries = [entry.split() for line in table.split("\n") for entry in line.split("|") if entry]
    return {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}


def allowed_calls(machine: str = MACHINE) -> dict[str, int]:
    """Return name -> number of the calls that programs may make; empty for an architecture that is not known."""
    return _parse(_TABLE, machine)


def other_calls(machine: str = MACHINE) -> dict[str, int]:
    """Return name -> number of further calls, which set up a sandbox; empty for an architecture that is not known."""
    return _parse(_OTHERS, machine)


_libc = ctypes.CDLL(None, use_errno=True)


def syscall(name: str, *arguments: object) -> int:
    """Make a system call of `other_calls` and return its result.

    Raises:
        OSError: the call failed; its message names the call.
    """
    return check(_libc.syscall(ctypes.c_long(other_calls()[name]), *arguments), name)


def prctl(option: int, value: int = 0, *, argument: object = 0) -> None:
    """Change a property of this process by the system call prctl.

    Raises:
        OSError: the call failed.
    """
    check(_libc.prctl(option, ctypes.c_ulong(value), argument, 0, 0), f"prctl({option})")


def libc_call(name: str, *arguments: object) -> int:
    """Call a function of the C library that returns -1 on failure, and return its result.

    Raises:
        OSError: the call failed; its message names the function.
    """
    return check(getattr(_libc, name)(*arguments), name)


def check(result: int, name: str) -> int:
    """Return the result of a C function; raise the OSError of errno, with the function's name, if it is -1."""
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def drop_bounding_set() -> None:
    """Drop all capabilities that a program could gain by executing a file; needs CAP_SETPCAP."""
    capability = 0
    while True:
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # the kernel has no more
        capability += 1


def drop_capabilities() -> None:
    """Drop all capabilities of this process."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    syscall("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


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
