"""The process behind `equivalence.py`: pairs of expressions on stdin, 1 or 0 on stdout."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys

MEMORY_BYTES = 4 << 30
"""Ends `10^{10^{10}}` before the machine swaps."""


def main() -> None:
    """Answer until stdin ends, which is when the parent does."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a stray print must not pass for a reply
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    logging.disable(logging.WARNING)  # math-verify warns that it has no timeout; the parent is the timeout

    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig()]
    replies.write("ready\n")
    for line in sys.stdin:
        # Boxed, so that math-verify takes the whole of it, and a bare reference as LaTeX too.
        prediction, reference = (parse(f"\\boxed{{{text}}}", latex, parsing_timeout=None) for text in json.loads(line))
        equal = bool(prediction) and bool(reference) and verify(reference, prediction, timeout_seconds=None)
        replies.write("1\n" if equal else "0\n")


if __name__ == "__main__":
    main()
