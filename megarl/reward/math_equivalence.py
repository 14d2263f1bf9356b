"""Checks with math-verify whether two mathematical expressions are equal, with a timeout.

    this process                                 child process (math_equivalence_child.py)
    is_equivalent("x+1", "1+x")  -- JSON line -->  math_verify.parse, verify
                                 <-- "1" / "0" --
                                 no reply: kill the child and raise; the next request starts another one

Policies write expressions like `9^{9^{9^9}}`, on which sympy computes forever inside one C call. That call cannot be
interrupted by a signal or a thread, and it blocks every other thread of the process. Only a separate process can be
killed.
"""

from __future__ import annotations

import atexit
import json
import queue
import selectors
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

from megarl.errors import RewardError

CHILD = Path(__file__).with_name("math_equivalence_child.py")
START_TIMEOUT_SECONDS = 120.0
"""Timeout for the start of the child process. Importing sympy takes one second, more on a busy node."""

TIMEOUT_SECONDS = 5.0
"""Default timeout for the comparison of two expressions; most take milliseconds."""

MAX_CHECKERS = 4
"""Maximum number of child processes, each of which takes about 100 MB. They start when they are needed."""


class EquivalenceError(Exception):
    """Two expressions could not be compared: math-verify took too long, or its process died."""


class EquivalenceChecker:
    """Checks expressions in one child process, which is started at the first request; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def is_equivalent(self, prediction: str, reference: str, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
        """Whether the two expressions (LaTeX or plain) were shown to be equal.

        Raises:
            EquivalenceError: the child process took longer than `timeout_seconds`, or died.
            RewardError: the child process does not start.
        """
        with self._lock:
            child = self._ensure_started()
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps([prediction, reference]).encode() + b"\n")
                child.stdin.flush()
            except BrokenPipeError:
                reply: bytes | None = b""
            else:
                reply = _read_line(child, timeout_seconds)
            if not reply:
                code = self._stop()
                what = (
                    f"math-verify took longer than timeout_seconds = {timeout_seconds:g}"
                    if reply is None
                    else f"the process of math-verify died with exit code {code}"
                )
                raise EquivalenceError(what)
            return reply == b"1\n"

    def close(self) -> None:
        """Stop the child process; the next request starts another."""
        with self._lock:
            self._stop()

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            # -P: the modules in the script's folder must not shadow those of the library
            self._child = subprocess.Popen(  # noqa: S603 -- this interpreter and a script of this package
                [sys.executable, "-P", str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            if _read_line(self._child, START_TIMEOUT_SECONDS) != b"ready\n":
                self._stop()
                raise RewardError("the numeric reward needs math-verify, but its process did not start (see above)")
        return self._child

    def _stop(self) -> int | None:
        """Kill the child process if it lives; return its exit code."""
        child, self._child = self._child, None
        if child is None:
            return None
        child.kill()
        code = child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        return code


class CheckerPool:
    """Some `EquivalenceChecker`s that work at the same time, each of which starts when the others are busy."""

    def __init__(self, size: int = MAX_CHECKERS) -> None:
        self._checkers = [EquivalenceChecker() for _ in range(size)]
        self._free: queue.LifoQueue[EquivalenceChecker] = queue.LifoQueue()  # last in, first out: prefers started ones
        for checker in self._checkers:
            self._free.put(checker)

    def is_equivalent(self, prediction: str, reference: str, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
        """As `EquivalenceChecker.is_equivalent`, in a checker that is free."""
        checker = self._free.get()
        try:
            return checker.is_equivalent(prediction, reference, timeout_seconds)
        finally:
            self._free.put(checker)

    def close(self) -> None:
        """Stop all child processes; a later request starts others."""
        for checker in self._checkers:
            checker.close()


def _read_line(child: subprocess.Popen[bytes], timeout_seconds: float) -> bytes | None:
    """Return the child's next line, empty if it died, or None after a timeout. Lines are short: they arrive at once."""
    assert child.stdout is not None
    with selectors.PollSelector() as selector:  # select.select fails for descriptors above 1023
        selector.register(child.stdout, selectors.EVENT_READ)
        ready = selector.select(timeout_seconds)
    return child.stdout.readline() if ready else None


_pool = CheckerPool()
atexit.register(_pool.close)


@lru_cache(maxsize=8192)
def is_equivalent(prediction: str, reference: str, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
    """Whether two expressions are equal, by one process-wide `CheckerPool`, with a cache of its results.

    Raises as `EquivalenceChecker.is_equivalent`; failures are not cached.
    """
    return _pool.is_equivalent(prediction, reference, timeout_seconds)
