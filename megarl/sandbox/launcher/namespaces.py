"""Namespaces and the root folder of a sandbox that megarl starts itself.

supervisor     user, pid, network, IPC, UTS and cgroup namespaces are new; the files are still those of the host
first process  a mount namespace of its own, in which all of the host's files are replaced by a few folders, read-only
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from megarl.sandbox.guest.channel import Limits
from megarl.sandbox.guest.confine import DEVICES, FOLDER
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
