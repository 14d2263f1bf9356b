"""Checks with math-verify whether two mathematical expressions are equal, with a timeout of two seconds.

    this process                                 child process (math_equivalence_child.py)
    is_equivalent("x+1", "1+x")  -- JSON line -->  math_verify.parse, verify
                                 <-- "1" / "0" --
                                 no reply: kill the child, return False, start another for the next request

Policies write expressions like `9^{9^{9^9}}`, on which sympy computes forever inside one C call. That call cannot be
interrupted by a signal or a thread, and it blocks every other thread of the process. Only a separate process can be
killed.
"""

from __future__ import annotations

import atexit
import json
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


class EquivalenceChecker:
    """Checks expressions in one child process, which is started at the first request; thread-safe."""

    def __init__(self, timeout_seconds: float = 2.0) -> None:
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def is_equivalent(self, prediction: str, reference: str) -> bool:
        """Whether the two expressions (LaTeX or plain) were shown to be equal within `timeout_seconds`.

        Raises:
            RewardError: the child process does not start.
        """
        with self._lock:
            child = self._ensure_started()
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps([prediction, reference]).encode() + b"\n")
                child.stdin.flush()
            except BrokenPipeError:
                self._stop()
                return False
            reply = _read_line(child, self.timeout_seconds)
            if reply is None:
                self._stop()
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

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()


def _read_line(child: subprocess.Popen[bytes], timeout_seconds: float) -> bytes | None:
    """Return the child's next line, or None if it died or timed out. Lines are short enough to arrive at once."""
    assert child.stdout is not None
    with selectors.PollSelector() as selector:  # select.select fails for descriptors above 1023
        selector.register(child.stdout, selectors.EVENT_READ)
        ready = selector.select(timeout_seconds)
    return child.stdout.readline() or None if ready else None


_checker = EquivalenceChecker()
atexit.register(_checker.close)


@lru_cache(maxsize=8192)
def is_equivalent(prediction: str, reference: str) -> bool:
    """Whether two expressions are equal, by one process-wide `EquivalenceChecker` with a cache of its results."""
    return _checker.is_equivalent(prediction, reference)
