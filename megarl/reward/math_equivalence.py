r"""Compares mathematical answers with sympy, in processes that can be ended.

    this process                              child process (math_equivalence_child.py)
    compare(prediction, reference) -- JSON -->  forks; the fork parses with latex2sympy, compares with sympy
                                  <-- word --   "equal", "unequal", "undecided" ...
                                  no reply: kill the child; the next request starts another one

Policies write expressions like `9^{9^{9^9}}`, on which sympy computes forever inside one C call. That call cannot be
interrupted by a signal handler or a thread, and it blocks every other thread of the process. Each comparison therefore
has a process of its own, a fork, which the kernel ends after `cpu_seconds` or at its limit of memory. What ends a
comparison is the outcome of the prediction, "undecided", if the reference can be compared with itself.
"""

from __future__ import annotations

import atexit
import json
import queue
import re
import selectors
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias, cast

from megarl.errors import RewardError

ANSWER_MARK = "####"

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED = re.compile(r"[^\s$]+")
_LEAD_IN = re.compile(
    r"[*_\s]*(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|our|my)\s+)?(?:final\s+|correct\s+)?answer[*_]*\s*"
    r"(?:is\b|[:=])?\s*[:=]?[*_]*\s*",
    re.IGNORECASE,
)
_HEADING = re.compile(r"[*_\s]*(?:(?:step|part)?\s*\d+\s*[.):]\s*)?[^\W\d_]{2,}(?![^\W\d_]*\s*[=\d])", re.IGNORECASE)
"""Matches a heading of a section, such as `Verification` or `2. Check`; `x = 5` and `\text{No}` are none."""


def extract_final_answer(text: str) -> str | None:
    r"""Return the text after the last `####` (up to the end of the line) or in the last `\boxed{}`, whichever is later.

    `\fbox{}` is a box, too, and braces may be missing (`\boxed 5`). "Answer:" and "The answer is" after `####` are
    left out. A heading of words (`#### Verification`) is no answer if there is a box or another `####`. Returns None if
    there is neither, or if it is empty. Runs in time linear in the length of the text.

    Examples:
        >>> extract_final_answer("6 * 12 = 72\n#### 72"), extract_final_answer(r"that is \boxed{1/2}.")
        ('72', '1/2')
    """
    marked, end = None, len(text)
    box_end = max((match.end() for match in _BOX.finditer(text)), default=-1)
    while (begin := text.rfind(ANSWER_MARK, 0, end)) > box_end:
        line = text[begin + len(ANSWER_MARK) : _line_end(text, begin)]
        if line.strip() and not _HEADING.match(_without_lead_in(line)):
            return _read_marked(text, begin)
        marked = begin if marked is None else marked
        end = text.rfind("\n", 0, begin)
        if end <= box_end:
            break
    if box_end >= 0:
        return _read_box(text, box_end).strip() or None
    return None if marked is None else _read_marked(text, marked)


def _read_marked(text: str, begin: int) -> str | None:
    """Return the answer after the mark at `begin`; after `#### Answer:` alone, it is the next line."""
    end = _line_end(text, begin)
    line = text[begin + len(ANSWER_MARK) : end].strip()
    answer = _without_lead_in(line)
    if not answer and line:
        answer = text[end:].lstrip().split("\n", 1)[0].strip()
    return answer or None


def _without_lead_in(line: str) -> str:
    match = _LEAD_IN.match(line)
    return line[match.end() :].strip() if match else line.strip()


def _line_end(text: str, begin: int) -> int:
    end = text.find("\n", begin)
    return len(text) if end < 0 else end


def _read_box(text: str, start: int) -> str:
    """Return the content of the box whose command ends at `start`; empty if its brace is not closed."""
    if not text.startswith("{", start):
        match = _UNBRACED.match(text, start)
        return match[0] if match else ""
    depth = 0
    at = start
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : at]
        at += 1
    return ""


CHILD = Path(__file__).with_name("math_equivalence_child.py")
START_TIMEOUT_SECONDS = 120.0
"""Timeout for the start of the child process. Importing sympy takes one second, more on a busy node."""

CPU_SECONDS = 1.0
"""Default limit of the CPU time of a comparison; most take milliseconds."""

TIMEOUT_SECONDS = 60.0
"""Default wall time without a reply after which the child process is taken for hung."""

MAX_CHECKERS = 4
"""Maximum number of child processes, each of which takes about 100 MB. They start when they are needed."""

Comparison: TypeAlias = Literal["equal", "unequal", "undecided"]
"""Result of a comparison; undecided: it took too much time or memory, for which the prediction is responsible."""


class EquivalenceError(Exception):
    """A reference cannot be compared with itself, or the process of sympy is lost."""


class EquivalenceChecker:
    """Compares answers by one child process, which is started at the first request; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.child: subprocess.Popen[bytes] | None = None
        """The process of sympy; None before the first request, and after it was stopped or lost."""

    def compare(
        self,
        prediction: str,
        reference: str,
        cpu_seconds: float = CPU_SECONDS,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> str:
        """Return the child's word for two structures in JSON, one of its `EXIT_CODES`.

        Raises:
            EquivalenceError: the child process did not reply for `timeout_seconds`, or died.
            RewardError: the child process does not start.
        """
        with self._lock:
            child = self._ensure_started()
            assert child.stdin is not None
            try:
                child.stdin.write(f"[{prediction}, {reference}, {json.dumps(cpu_seconds)}]\n".encode())
                child.stdin.flush()
            except BrokenPipeError:
                reply: bytes | None = b""
            else:
                reply = _read_line(child, timeout_seconds)
            if not reply:
                code = self._stop()
                what = (
                    f"the process of sympy did not reply for timeout_seconds = {timeout_seconds:g}"
                    if reply is None
                    else f"the process of sympy died with exit code {code}"
                )
                raise EquivalenceError(what)
            return reply.decode().strip()

    def close(self) -> None:
        """Stop the child process; the next request starts another."""
        with self._lock:
            self._stop()

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        if self.child is None:
            # -P: the modules in the script's folder must not shadow those of the library
            self.child = subprocess.Popen(  # noqa: S603 -- this interpreter and a script of this package
                [sys.executable, "-P", str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            if _read_line(self.child, START_TIMEOUT_SECONDS) != b"ready\n":
                self._stop()
                raise RewardError(
                    "the reward math needs sympy and latex2sympy2_extended, but their process did not start (see above)"
                )
        return self.child

    def _stop(self) -> int | None:
        """Kill the child process if it lives; return its exit code."""
        child, self.child = self.child, None
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
        self.checkers = [EquivalenceChecker() for _ in range(size)]
        self._free: queue.LifoQueue[EquivalenceChecker] = queue.LifoQueue()  # last in, first out: prefers started ones
        for checker in self.checkers:
            self._free.put(checker)

    def compare(self, prediction: str, reference: str, cpu_seconds: float, timeout_seconds: float) -> str:
        """As `EquivalenceChecker.compare`, in a checker that is free."""
        checker = self._free.get()
        try:
            return checker.compare(prediction, reference, cpu_seconds, timeout_seconds)
        finally:
            self._free.put(checker)

    def close(self) -> None:
        """Stop all child processes; a later request starts others."""
        for checker in self.checkers:
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
def compare(
    prediction: str, reference: str, cpu_seconds: float = CPU_SECONDS, timeout_seconds: float = TIMEOUT_SECONDS
) -> Comparison:
    """Compare two structures in JSON by one process-wide `CheckerPool`, with a cache of its results.

    If the comparison comes to no result, the reference is compared with itself, to see which of the two is responsible.

    Raises:
        EquivalenceError: the reference cannot be read, or cannot be compared with itself; failures are not cached.
        RewardError: the child process does not start.
    """
    try:
        word = _pool.compare(prediction, reference, cpu_seconds, timeout_seconds)
    except EquivalenceError:
        require_comparable(reference, cpu_seconds, timeout_seconds)
        return "undecided"
    if word in ("equal", "unequal"):
        return cast("Comparison", word)
    require_comparable(reference, cpu_seconds, timeout_seconds)
    return "unequal" if word == "unreadable prediction" else "undecided"


@lru_cache(maxsize=8192)
def require_comparable(
    reference: str, cpu_seconds: float = CPU_SECONDS, timeout_seconds: float = TIMEOUT_SECONDS
) -> None:
    """Compare a reference with itself.

    Raises:
        EquivalenceError: it is not equal to itself; the message has the reason.
        RewardError: the child process does not start.
    """
    word = _pool.compare(reference, reference, cpu_seconds, timeout_seconds)
    if word == "undecided":
        raise EquivalenceError(
            f"the reference answer takes more than cpu_seconds = {cpu_seconds:g}, or too much memory"
        )
    if word != "equal":
        raise EquivalenceError("the reference answer cannot be read")
