"""Creates the Python environment in which another project's trainer runs."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from megarl.errors import WorkerError


def make_peer_environment(
    folder: Path, requirements: Path, name: str, notify: Callable[[str], None], *options: str
) -> Path:
    """Install pinned packages in `folder`, if they are not there, and return the environment's Python.

    Packages that are not pinned, such as torch and Ray, are those of this environment; a folder that was made for
    another one is made again.

    Args:
        requirements: a file of pip.
        name: of the project, for messages.
        options: of pip's install command.

    Raises:
        WorkerError: pip failed; the message ends with its output.
    """
    python, done = folder / "bin/python", folder / "installed.txt"
    shared = sysconfig.get_path("purelib") + "\n"
    installed = requirements.read_text() + shared
    if done.exists() and done.read_text() == installed:
        return python
    notify(f"installing {name} in {folder}")
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    packages = Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "shared.pth").write_text(shared)
    install = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options)
    _run(*install, "-r", str(requirements))
    done.write_text(installed)
    return python


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkerError(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
