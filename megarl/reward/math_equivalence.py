"""Whether two mathematical expressions are equal, by math-verify, for at most two seconds.

    this process                              child process (equivalence_child.py)
    equivalent("x+1", "1+x")  -- JSON line -->  math_verify.parse, verify
                              <-- "1" / "0" --
                              no reply: kill, answer False, start another at the next question

Policies write things like `9^{9^{9^9}}`, on which sympy computes for ever inside one C call: neither a signal nor a
thread gets in, and every other thread of the process waits. Only another process can be stopped.
"""

from __future__ import annotations

import atexit
import json
import select
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

from megarl.errors import RewardError

CHILD = Path(__file__).with_name("math_equivalence_child.py")
START_SECONDS = 120.0
"""Importing sympy takes one second, more on a busy machine."""


class EquivalenceChecker:
    """One child process, started at the first question; safe to share between threads."""

    def __init__(self, timeout_seconds: float = 2.0) -> None:
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def equivalent(self, prediction: str, reference: str) -> bool:
        """Whether the two (LaTeX or plain) were shown to be equal within `timeout_seconds`.

        Raises:
            RewardError: the child process does not start.
        """
        with self._lock:
            child = self._started()
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps([prediction, reference]).encode() + b"\n")
                child.stdin.flush()
            except BrokenPipeError:
                self._stop()
                return False
            reply = _line(child, self.timeout_seconds)
            if reply is None:
                self._stop()
            return reply == b"1\n"

    def close(self) -> None:
        """Stop the child process; the next question starts another."""
        with self._lock:
            self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            # -P: the script's folder holds modules of ours that must not shadow the library's.
            self._child = subprocess.Popen(  # noqa: S603 -- this interpreter, a script of ours
                [sys.executable, "-P", str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            if _line(self._child, START_SECONDS) != b"ready\n":
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


def _line(child: subprocess.Popen[bytes], timeout_seconds: float) -> bytes | None:
    """The child's next line, None where it died or took too long. Lines are short: they arrive whole."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], timeout_seconds)
    return child.stdout.readline() or None if ready else None


_checker = EquivalenceChecker()
atexit.register(_checker.close)


@lru_cache(maxsize=8192)
def equivalent(prediction: str, reference: str) -> bool:
    """As `EquivalenceChecker.equivalent`, by one process-wide checker that remembers its answers."""
    return _checker.equivalent(prediction, reference)
