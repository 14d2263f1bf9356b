"""Namespaces, the root folder and control groups of a sandbox that megarl starts itself.

supervisor     user, pid, network, IPC, UTS and cgroup namespaces are new; the files are still those of the host
first process  a mount namespace of its own, in which all of the host's files are replaced by a few folders, read-only

Control groups limit the memory and processes of a sandbox together, where this process may create them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import time
from collections.abc import Mapping, Sequence

from megarl.sandbox.guest.channel import Limits
from megarl.sandbox.guest.confine import DEVICES, FOLDER, RUNNER_BYTES
from megarl.sandbox.guest.seccomp import libc_call, syscall

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1 << i for i in (0, 1, 2, 3, 5, 12, 14, 18)
)
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

MAX_FILES = 4096
"""Files and folders in /tmp."""

_BASE = "/tmp"  # noqa: S108 -- a folder of the host that exists; in the mount namespace the new root covers it
_OLD = "/.host"


def enter_user_namespace() -> bool:
    """Enter a new user namespace as its root; return whether it has the users of the host, which only root can map.

    Raises:
        OSError: the kernel or a container's policy does not allow it.
    """
    if os.geteuid() != 0:
        uid, gid = os.getuid(), os.getgid()
        libc_call("unshare", CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
        return False
    # a process outside of the namespace has to write a map with more than one user
    maps = {name: _identity_map(name) for name in ("uid_map", "gid_map")}
    is_inside, enter = os.pipe()
    target = os.getpid()
    writer = os.fork()
    if writer == 0:
        code = 1
        try:
            os.close(enter)
            if os.read(is_inside, 1):
                for name, content in maps.items():
                    _write(f"/proc/{target}/{name}", content)
                code = 0
        finally:
            os._exit(code)
    os.close(is_inside)
    libc_call("unshare", CLONE_NEWUSER)
    os.write(enter, b"1")
    os.close(enter)
    if os.waitpid(writer, 0)[1] != 0:
        raise OSError("cannot map the users of the host into a user namespace")
    return True


def enter_namespaces() -> None:
    """Enter new network, IPC, UTS and cgroup namespaces; the next child is the first process of a pid namespace.

    Raises:
        OSError: the kernel or a container's policy does not allow it.
    """
    libc_call("unshare", CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)


def enter_root(readable: Sequence[str], limits: Limits) -> None:
    """Replace the files that this process sees by the folders `readable` and an empty /tmp.

    The process needs to be the first of its pid namespace.

    Raises:
        OSError: a mount failed.
    """
    libc_call("unshare", CLONE_NEWNS)
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", _BASE, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
    os.mkdir(_BASE + _OLD)
    syscall("pivot_root", _BASE.encode(), (_BASE + _OLD).encode())
    os.chdir("/")
    for path in readable:
        bind_read_only(path)
    os.mkdir("/dev")
    for device in DEVICES:
        with open(device, "w"):
            pass
        _mount(_OLD + device, device, None, MS_BIND)
    os.mkdir("/proc")
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
    os.mkdir(FOLDER)
    options = f"mode=1777,size={limits.disk_bytes},nr_inodes={MAX_FILES}"
    _mount("tmpfs", FOLDER, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    libc_call("umount2", _OLD.encode(), MNT_DETACH)
    os.rmdir(_OLD)
    _mount("none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    libc_call("sethostname", b"sandbox", ctypes.c_size_t(7))
    os.chdir(FOLDER)


def bind_read_only(path: str) -> None:
    """Show a file or folder of the host at the same path, read-only; a link becomes the same link."""
    source = _OLD + path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        with open(path, "w"):
            pass
    _mount(source, path, None, MS_BIND | MS_REC)
    attributes = struct.pack("=QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    syscall(
        "mount_setattr",
        ctypes.c_int(_AT_FDCWD),
        path.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )


def _identity_map(name: str) -> str:
    """Return the users or groups of this user namespace, each mapped to itself."""
    with open(f"/proc/self/{name}") as file:
        extents = [line.split() for line in file]
    return "".join(f"{inside} {inside} {count}\n" for inside, _, count in extents)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    try:
        libc_call("mount", *arguments, ctypes.c_ulong(flags), None if options is None else options.encode())
    except OSError as e:
        raise OSError(e.errno, f"cannot mount {target}: {os.strerror(e.errno or 0)}") from e


CGROUP_ROOT = "/sys/fs/cgroup"
CGROUP_PREFIX = "megarl-sandbox-"
REMOVE_SECONDS = 2.0
"""Timeout in seconds for the kernel to release an empty cgroup."""


class ControlGroup:
    """The groups of one sandbox: one folder with version 2, one for memory and one for pids with version 1."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._folders = folders
        self._fds = [os.open(f"{folder}/cgroup.procs", os.O_WRONLY) for folder in folders.values()]

    @classmethod
    def create(cls, limits: Limits, *, extra_bytes: int = 0, extra_processes: int = 0) -> ControlGroup | None:
        """Return new groups below those of this process; None where there are none that may be changed.

        Args:
            limits: limits of the programs.
            extra_bytes: memory of what runs beside the programs and their runner.
            extra_processes: its processes and threads.
        """
        parents = _writable_parents()
        if not parents:
            return None
        name = f"{CGROUP_PREFIX}{os.getpid()}"
        folders = {controller: f"{parent}/{name}" for controller, parent in parents.items()}
        try:
            for folder in dict.fromkeys(folders.values()):
                os.mkdir(folder)
            for controller, folder in folders.items():
                is_version_2 = os.path.exists(f"{folder}/cgroup.controllers")
                if controller == "memory":
                    name = "memory.max" if is_version_2 else "memory.limit_in_bytes"
                    limit = limits.memory_bytes + limits.disk_bytes + RUNNER_BYTES + extra_bytes
                    _write(f"{folder}/{name}", str(limit))
                else:
                    _write(f"{folder}/pids.max", str(limits.max_processes + 1 + extra_processes))  # 1: the runner
            return cls(folders)
        except OSError:
            _remove(folders.values())
            return None

    def join(self) -> None:
        """Move this process into the groups.

        Raises:
            OSError: it may not.
        """
        for fd in self._fds:
            os.write(fd, b"0")

    def close(self) -> None:
        """Close the files of the groups, in a process that has joined."""
        for fd in self._fds:
            os.close(fd)

    def remove(self) -> None:
        """Remove the groups, whose processes have ended."""
        self.close()
        _remove(self._folders.values())


def remove_stale_groups() -> None:
    """Remove the groups of supervisors that have been killed; a group that has processes stays."""
    for parent in set(_writable_parents().values()):
        for name in os.listdir(parent):
            pid = name.removeprefix(CGROUP_PREFIX)
            if name.startswith(CGROUP_PREFIX) and not os.path.exists(f"/proc/{pid}"):
                with contextlib.suppress(OSError):
                    os.rmdir(f"{parent}/{name}")


def _writable_parents() -> dict[str, str]:
    """Return controller -> folder of this process's group, if both memory and pids can be limited below it."""
    found: dict[str, str] = {}
    with open("/proc/self/cgroup") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in lines:
        for controller in ("memory", "pids"):
            if controller in controllers.split(","):
                found[controller] = f"{CGROUP_ROOT}/{controller}{path}".rstrip("/")
            elif not controllers:
                folder = f"{CGROUP_ROOT}{path}".rstrip("/")
                with contextlib.suppress(OSError), open(f"{folder}/cgroup.subtree_control") as file:
                    if controller in file.read().split():
                        found.setdefault(controller, folder)
    is_writable = len(found) == 2 and all(os.access(folder, os.W_OK) for folder in found.values())
    return found if is_writable else {}


def _remove(folders: object) -> None:
    deadline = time.monotonic() + REMOVE_SECONDS
    for folder in dict.fromkeys(folders):  # type: ignore[call-overload]
        while True:
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                break
            except OSError as e:
                if e.errno != errno.EBUSY or time.monotonic() > deadline:
                    break
                time.sleep(0.002)
                continue
            break
