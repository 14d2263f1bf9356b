"""Ends phases that take too long, and says where their processes hang.

    controller thread      train: waits for the ranks .......................... fails
    watch's thread                 | timeout | reads every process's stack, writes the file
                                             `stacks/step-000012-train.txt`

A wait for worker processes ends by itself (`workers.failure.deadline`). Where the controller's own thread hangs in
something else, the user is told and the file has its stack too; no Python can end that.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ray.exceptions import RayError

from megarl.errors import MegarlError, WorkerError
from megarl.process.atomic_files import replaced
from megarl.workers.failures import deadline

STACKS_FOLDER = "stacks"


class PhaseWatch:
    """Of one run's phases, which may nest; an inner one has its time to itself."""

    def __init__(
        self, timeout_seconds: float | None, say: Callable[[str], None], stacks: Callable[[], str], folder: Path
    ) -> None:
        """Args:
        timeout_seconds: for each phase; None: phases may take any time.
        say: tells the user a line.
        stacks: of all worker processes, as text; called on another thread, and back in a bounded time.
        folder: of the run.
        """
        self._timeout, self._say, self._stacks, self._folder = timeout_seconds, say, stacks, folder

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """The block is to take `timeout_seconds` at most.

        Raises:
            WorkerError: it took longer; the message names the workers that have not answered.
        """
        if self._timeout is None:
            yield
            return
        late = _LatePhase(f"{name} of step {step}", self._timeout, self._folder / _file_name(step, name))
        timer = threading.Timer(self._timeout, late.look, (self._stacks, self._say))
        timer.name, timer.daemon = "phase watch", True
        timer.start()
        try:
            with deadline(late.judge):
                yield
        finally:
            timer.cancel()


class _LatePhase:
    """A phase, once it is late."""

    def __init__(self, what: str, seconds: float, path: Path) -> None:
        self._what, self._path = f"{what} took longer than {seconds:g} s", path
        self._watched = threading.get_ident()
        self._unanswered: Sequence[str] = ()
        self._seen, self._outcome = threading.Event(), ""

    def judge(self, late: Sequence[str]) -> MegarlError | None:
        """See `workers.failure.Judge`."""
        self._unanswered = late
        return WorkerError(self._text()) if self._seen.is_set() else None

    def look(self, stacks: Callable[[], str], say: Callable[[str], None]) -> None:
        """Write down where everything stands; from then on the phase fails."""
        try:
            say(f"{self._text()}; reading every process's stack")
            self._outcome = self._write(stacks)
            say(self._text())
        finally:
            self._seen.set()

    def _write(self, stacks: Callable[[], str]) -> str:
        """Where they are found, for the end of a message."""
        try:
            found = stacks()
        except (MegarlError, RayError, OSError) as error:
            found = f"no stacks of workers: {type(error).__name__}: {error}"
        try:
            with replaced(self._path) as draft:
                draft.write_text(f"{self._text()}\n\n{_stack_of(self._watched)}\n{found}\n")
        except OSError as error:
            return f"; stacks could not be written: {error}"
        return f"; stacks: {self._path}"

    def _text(self) -> str:
        unanswered = f"; no answer from {', '.join(self._unanswered)}" if self._unanswered else ""
        return f"{self._what}{unanswered}{self._outcome}"


def _file_name(step: int, name: str) -> str:
    return f"{STACKS_FOLDER}/step-{step:06d}-{name}.txt"


def _stack_of(thread: int) -> str:
    """Where a thread of this process is now, its innermost call last."""
    frame = sys._current_frames().get(thread)
    lines = traceback.format_stack(frame) if frame is not None else ["it has ended\n"]
    return "== controller, its innermost call last ==\n" + "".join(lines)
