"""The command line of bubblewrap, which sets up the namespaces and the root folder of a sandbox."""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Sequence

from megarl.sandbox.guest.confine import DEVICES, FOLDER
from megarl.sandbox.guest.limits import Limits

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
