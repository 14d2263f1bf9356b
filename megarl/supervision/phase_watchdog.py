"""Aborts phases that exceed their timeout, and records the stacks of all processes.

    controller thread      train: waits for the ranks .......................... fails
    watchdog thread                | timeout | collects all stacks, writes the file
                                             `stacks/step-000012-train.txt`

Only waits for worker processes can be aborted (`abort_check` in megarl.workers.failures). If the controller's own
thread hangs elsewhere, the user is notified and the file contains its stack, but the phase does not end.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ray.exceptions import RayError

from megarl.errors import HungWorkerError, MegarlError
from megarl.process.atomic_files import atomic_write
from megarl.workers.failures import LateNames, abort_check

STACKS_FOLDER = "stacks"


class PhaseWatchdog:
    """Timeouts for the phases of a run. Phases may nest: while an inner one is active, the outer one cannot fail."""

    def __init__(
        self, timeout_seconds: float | None, notify: Callable[[str], None], stacks: Callable[[], str], folder: Path
    ) -> None:
        """Args:
        timeout_seconds: for each phase; None: no timeout.
        notify: shows the user a line.
        stacks: returns the stacks of all worker processes as text; called on another thread, must return in bounded
            time.
        folder: the run folder.
        """
        self._timeout, self._notify, self._stacks, self._folder = timeout_seconds, notify, stacks, folder

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """Limit the block to `timeout_seconds`.

        Raises:
            HungWorkerError: the block took longer; the message names the workers that have not answered.
        """
        if self._timeout is None:
            yield
            return
        late = _PhaseTimeout(f"{name} of step {step}", self._timeout, self._folder / _file_name(step, name))
        timer = threading.Timer(self._timeout, late.dump_stacks, (self._stacks, self._notify))
        timer.name, timer.daemon = "phase watchdog", True
        timer.start()
        try:
            with abort_check(late.check_abort):
                yield
        finally:
            timer.cancel()


class _PhaseTimeout:
    """What happens when one phase exceeds its timeout."""

    def __init__(self, what: str, seconds: float, path: Path) -> None:
        self._what, self._path = f"{what} took longer than {seconds:g} s", path
        self._watched = threading.get_ident()
        self._late: LateNames = list
        self._dumped, self._outcome = threading.Event(), ""

    def check_abort(self, late: LateNames) -> MegarlError | None:
        """Return the error that aborts the wait, once the stacks are on disk."""
        self._late = late
        return HungWorkerError(self._text()) if self._dumped.is_set() else None

    def dump_stacks(self, stacks: Callable[[], str], notify: Callable[[str], None]) -> None:
        """Write all stacks to the file, then let the phase fail."""
        try:
            notify(f"{self._text()}; collecting the stacks of all processes")
            self._outcome = self._write(stacks)
            notify(self._text())
        finally:
            self._dumped.set()

    def _write(self, stacks: Callable[[], str]) -> str:
        """Write the file; return the end of the error message: the path, or why the write failed."""
        try:
            found = stacks()
        except (MegarlError, RayError, OSError) as error:
            found = f"could not collect the stacks of workers: {type(error).__name__}: {error}"
        try:
            with atomic_write(self._path) as draft:
                draft.write_text(f"{self._text()}\n\n{_stack_of(self._watched)}\n{found}\n")
        except OSError as error:
            return f"; stacks could not be written: {error}"
        return f"; stacks: {self._path}"

    def _text(self) -> str:
        late = self._late()
        unanswered = f"; no answer from {', '.join(late)}" if late else ""
        return f"{self._what}{unanswered}{self._outcome}"


def _file_name(step: int, name: str) -> str:
    return f"{STACKS_FOLDER}/step-{step:06d}-{name}.txt"


def _stack_of(thread: int) -> str:
    """Return the current stack of a thread of this process, innermost call last."""
    frame = sys._current_frames().get(thread)
    lines = traceback.format_stack(frame) if frame is not None else ["the thread has ended\n"]
    return "== controller, innermost call last ==\n" + "".join(lines)
