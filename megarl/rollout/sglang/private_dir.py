"""Temporary folders that do not outlive a killed process for long: the next one that makes such a folder removes them.

A process holds a lock in its folder as long as it lives.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path

LOCK = "in-use"


class PrivateFolder:
    """One of this process, until `remove`."""

    def __init__(self, prefix: str) -> None:
        """Make it among the system's temporary files; folders of that prefix whose processes are gone are removed."""
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_abandoned(folder)
        while True:
            self.path = tempfile.mkdtemp(prefix=prefix)
            self._lock = (Path(self.path) / LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (Path(self.path) / LOCK).exists():
                break
            self._lock.close()  # another process was quicker with the lock, and took the folder for abandoned

    def remove(self) -> None:
        """Remove it with all that is in it; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(folder: Path) -> None:
    try:
        lock = (folder / LOCK).open()
    except OSError:
        return  # somebody else's, or one that is just being made
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(folder, ignore_errors=True)
