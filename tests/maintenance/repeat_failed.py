"""Runs the tests that failed in the last run of pytest once more, each alone, one after another.

    make test || python -m tests.maintenance.repeat_failed

Tests that pass now are flaky: the program prints `flaky: TESTS` and succeeds. It fails if one fails again, if more than
`MOST` had failed, and if the run ended for another reason than failed tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST = 3
"""Failed tests that are repeated at most: more of them are no accident."""

CACHE = Path(".pytest_cache/v/cache")
EXIT_STATUS = "megarl/exit_status"
"""Key in pytest's cache of the exit status of the last run; `tests/conftest.py` writes it."""


def failed_tests() -> list[str]:
    """Return the ids of the tests that failed in the last run.

    Raises:
        SystemExit: the run is not known to have ended with failed tests only.
    """
    status = _read_cache(CACHE.parent / EXIT_STATUS)
    if status != pytest.ExitCode.TESTS_FAILED:
        sys.exit(f"the last run of pytest did not end with failed tests: exit status {status}")
    return list(_read_cache(CACHE / "lastfailed") or ())


def _read_cache(file: Path) -> object:
    return json.loads(file.read_text()) if file.exists() else None


def passes(test: str) -> bool:
    """Run one test in a process of its own; its output is printed."""
    print(f"once more: {test}", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    return subprocess.run(command, check=False).returncode == pytest.ExitCode.OK


def main() -> int:
    """Repeat the failed tests; return 0 if all pass."""
    failed = failed_tests()
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests failed; up to {MOST} are repeated")
        return 1
    again = [test for test in failed if not passes(test)]
    if again:
        print("failed twice:", *again)
        return 1
    print("flaky:", *failed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
