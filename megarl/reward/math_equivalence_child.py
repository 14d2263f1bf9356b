"""The child process of `math_equivalence.py`: reads pairs of expressions on stdin, writes 1 or 0 to stdout."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys

MEMORY_BYTES = 4 << 30
"""Memory limit of the process, which ends expressions like `10^{10^{10}}` before the node swaps."""


def main() -> None:
    """Reply to each line of stdin until it is closed, which happens when the parent exits."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a stray print must not be taken for a reply
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    logging.disable(logging.WARNING)  # math-verify warns that it has no timeout; the parent is the timeout

    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig()]
    replies.write("ready\n")
    for line in sys.stdin:
        # boxed, so that math-verify parses the full text, and also parses a plain reference as LaTeX
        prediction, reference = (parse(f"\\boxed{{{text}}}", latex, parsing_timeout=None) for text in json.loads(line))
        equal = bool(prediction) and bool(reference) and verify(reference, prediction, timeout_seconds=None)
        replies.write("1\n" if equal else "0\n")


if __name__ == "__main__":
    main()
