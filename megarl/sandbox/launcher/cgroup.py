"""Control groups that limit the memory and processes of a sandbox together, where this process may create them."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping

from megarl.sandbox.guest.channel import Limits
from megarl.sandbox.guest.confine import RUNNER_BYTES

ROOT = "/sys/fs/cgroup"
PREFIX = "megarl-sandbox-"
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
        name = f"{PREFIX}{os.getpid()}"
        folders = {controller: f"{parent}/{name}" for controller, parent in parents.items()}
        try:
            for folder in dict.fromkeys(folders.values()):
                os.mkdir(folder)
            for controller, folder in folders.items():
                is_version_2 = os.path.exists(f"{folder}/cgroup.controllers")
                if controller == "memory":
                    name = "memory.max" if is_version_2 else "memory.limit_in_bytes"
                    _write(f"{folder}/{name}", limits.memory_bytes + limits.disk_bytes + RUNNER_BYTES + extra_bytes)
                else:
                    _write(f"{folder}/pids.max", limits.max_processes + 1 + extra_processes)  # the runner
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
            pid = name.removeprefix(PREFIX)
            if name.startswith(PREFIX) and not os.path.exists(f"/proc/{pid}"):
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
                found[controller] = f"{ROOT}/{controller}{path}".rstrip("/")
            elif not controllers:
                folder = f"{ROOT}{path}".rstrip("/")
                with contextlib.suppress(OSError), open(f"{folder}/cgroup.subtree_control") as file:
                    if controller in file.read().split():
                        found.setdefault(controller, folder)
    is_writable = len(found) == 2 and all(os.access(folder, os.W_OK) for folder in found.values())
    return found if is_writable else {}


def _write(path: str, value: int) -> None:
    with open(path, "w") as file:
        file.write(str(value))


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
