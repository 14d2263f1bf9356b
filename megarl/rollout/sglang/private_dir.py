"""Temporary folders that are removed even if their process was killed: by the next process that creates one.

A process holds a lock on a file in its folder for as long as it lives.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path

LOCK_FILE = "in-use"


class PrivateFolder:
    """A temporary folder that belongs to this process until `remove` is called."""

    def __init__(self, prefix: str) -> None:
        """Create the folder among the system's temporary files, and remove those of dead processes with this prefix."""
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_abandoned(folder)
        while True:
            self.path = tempfile.mkdtemp(prefix=prefix)
            self._lock = (Path(self.path) / LOCK_FILE).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (Path(self.path) / LOCK_FILE).exists():
                break
            self._lock.close()  # another process locked it first, and removed the folder as abandoned

    def remove(self) -> None:
        """Remove the folder and its contents; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(folder: Path) -> None:
    try:
        lock = (folder / LOCK_FILE).open()
    except OSError:
        return  # not a private folder, or one that is just being created
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(folder, ignore_errors=True)
