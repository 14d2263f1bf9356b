"""The bundle and the command line of gVisor's runsc: a kernel of its own, in a process, for each sandbox.

Programs make system calls to that kernel, which makes a few of its own to the host's. Its platform is ptrace, which
needs no rights. It has no Landlock and no file descriptors of processes, and does not limit the number of processes.
"""

from __future__ import annotations

import json
import marshal
import os
import sys
from collections.abc import Sequence

from megarl.sandbox.guest.confine import FOLDER
from megarl.sandbox.guest.limits import MIB, Limits
from megarl.sandbox.launcher.bubblewrap import GUEST, KEPT_CAPABILITIES, MODULES, PACKAGE, START

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
