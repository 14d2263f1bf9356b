"""The command lines of bubblewrap and of gVisor's runsc, with which programs outside of megarl set up a sandbox.

Bubblewrap sets up namespaces and a root folder. runsc is a kernel of its own, in a process, for each sandbox: programs
make system calls to that kernel, which makes a few of its own to the host's. Its platform is ptrace, which needs no
rights. It has no Landlock and no file descriptors of processes, and does not limit the number of processes.
"""

from __future__ import annotations

import json
import marshal
import os
import sys
from collections.abc import Sequence

from megarl.sandbox.guest.channel import MIB, Limits
from megarl.sandbox.guest.confine import DEVICES, FOLDER

GUEST = "/guest"
"""Folder in the sandbox with the modules of `megarl.sandbox.guest`."""

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODULES = ("__init__.py", "sandbox/__init__.py", "sandbox/guest")

START = f"import sys; sys.path.insert(0, {GUEST!r}); from megarl.sandbox.guest.runner import main; main()"
"""Source that starts a runner in a new Python, with its settings as argument."""

MIN_VERSION = (0, 8)
"""First version with `--size`."""

KEPT_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_SYS_ADMIN")
"""What the runner needs to give up its user, mounts and the rest; it drops them before it runs a program."""


def bubblewrap_command(
    program: str, readable: Sequence[str], limits: Limits, *, channel: int, become_nobody: bool
) -> list[str]:
    """Return the command that starts a runner as the first process of a sandbox, run by the root of a user namespace.

    Args:
        program: path of bwrap.
        readable: files and folders of the host that programs may read.
        limits: limits of the sandbox.
        channel: file descriptor of the connection to the host.
        become_nobody: change to user nobody, which the user namespace has.
    """
    command = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"]
    command += ["--as-pid-1", "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
    command += ["--setenv", "PYTHONHASHSEED", "0", "--cap-drop", "ALL"]
    for capability in KEPT_CAPABILITIES:
        command += ["--cap-add", capability]
    for folder in _parents([*readable, *DEVICES]):
        command += ["--perms", "0755", "--dir", folder]  # otherwise /root and /dev are for root only
    for path in readable:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    for module in MODULES:
        command += ["--ro-bind", f"{PACKAGE}/{module}", f"{GUEST}/megarl/{module}"]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--proc", "/proc", "--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", FOLDER]
    command += ["--remount-ro", "/", "--chdir", FOLDER]
    settings = {
        "channel": channel,
        "limits": limits.as_dict(),
        "become_nobody": become_nobody,
        "readable": [*readable, GUEST],
        "unmount": (),
        "hide_kernel": True,
    }
    return [
        *command,
        "--",
        os.path.realpath(sys.executable),
        "-s",
        "-S",
        "-P",
        "-B",
        "-c",
        START,
        marshal.dumps(settings).hex(),
    ]


def _parents(paths: Sequence[str]) -> list[str]:
    """Return the folders above the paths, each after those above it."""
    found: dict[str, None] = {}
    for path in paths:
        names = path.split("/")[1:-1]
        found |= dict.fromkeys("/" + "/".join(names[: i + 1]) for i in range(len(names)))
    return [folder for folder in found if not any(folder == path for path in paths)]


STDIN = 0
"""File descriptor of the connection to the host, for the runner: runsc hands on stdin, stdout and stderr only."""

KERNEL_BYTES = 256 * MIB
KERNEL_PROCESSES = 256
"""Memory, and processes and threads, of gVisor's kernel and file server, beside those of programs."""

MOUNTED_ALWAYS = ("/sys",)
"""What gVisor mounts in each sandbox, its own, and the runner unmounts."""

NAMESPACES = ("pid", "network", "ipc", "uts", "mount")


def runsc_command(program: str, folder: str) -> list[str]:
    """Return the command that runs the bundle in a folder until its first process ends.

    Args:
        program: path of runsc.
        folder: bundle, in which runsc keeps its state too.
    """
    options = ["--rootless", "--network=none", "--platform=ptrace", "--ignore-cgroups", "--host-uds=none"]
    return [program, *options, f"--root={folder}/state", "run", f"--bundle={folder}", os.path.basename(folder)]


def write_bundle(folder: str, readable: Sequence[str], limits: Limits, *, become_nobody: bool) -> None:
    """Write the bundle of a sandbox: config.json of the OCI runtime specification, and a root folder without files.

    Args:
        folder: an empty folder.
        readable: files and folders of the host that programs may read.
        limits: limits of the sandbox.
        become_nobody: change to user nobody, which the user namespace has.
    """
    root = f"{folder}/root"
    os.mkdir(root)
    os.mkdir(f"{folder}/state")
    options = ["nosuid", "nodev", "noexec", "mode=1777", f"size={limits.disk_bytes}"]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": FOLDER, "type": "tmpfs", "source": "tmpfs", "options": options},
    ]
    shown = {path: path for path in readable if not os.path.islink(path)}
    shown |= {f"{GUEST}/megarl/{module}": f"{PACKAGE}/{module}" for module in MODULES}
    mounts += [
        {"destination": path, "type": "bind", "source": source, "options": ["rbind", "ro", "nosuid", "nodev"]}
        for path, source in shown.items()
    ]
    for path in readable:
        if os.path.islink(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
    settings = {
        "channel": STDIN,
        "limits": limits.as_dict(),
        "become_nobody": become_nobody,
        "readable": [],
        "unmount": MOUNTED_ALWAYS,
        "hide_kernel": False,  # it is gVisor's
    }
    python = [os.path.realpath(sys.executable), "-s", "-S", "-P", "-B", "-c", START, marshal.dumps(settings).hex()]
    config = {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": root, "readonly": True},
        "mounts": mounts,
        "process": {
            "args": python,
            "env": ["PYTHONHASHSEED=0"],
            "cwd": "/",
            "user": {"uid": 0, "gid": 0},
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), KEPT_CAPABILITIES),
        },
        "linux": {"namespaces": [{"type": name} for name in NAMESPACES]},
    }
    with open(f"{folder}/config.json", "w") as file:
        json.dump(config, file)
