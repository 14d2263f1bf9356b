"""Tests that failed are repeated as `.ci/run` does it, in a project of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.time_limits import HANG_SECONDS

ROOT = Path(__file__).parents[2]

FLAKY = """
import pathlib
def test_flaky{n}():
    file = pathlib.Path("ran{n}")
    ran = file.exists()
    file.touch()
    assert ran
"""
BROKEN = "def test_broken():\n    assert 0\n"
FINE = "def test_fine():\n    pass\n"
INTERRUPTED = "def test_interrupted():\n    raise KeyboardInterrupt\n"
FOUR = "".join(FLAKY.format(n=n) for n in range(4))

CASES = {
    "flaky": (FINE + FLAKY.format(n=0), 0, "flaky: test_it.py::test_flaky0\n"),
    "broken": (FINE + FLAKY.format(n=0) + BROKEN, 1, "failed twice: test_it.py::test_broken\n"),
    "four": (FOUR, 1, "4 tests failed; up to 3 are repeated\n"),
    "interrupted": (BROKEN + INTERRUPTED, 1, "did not end with failed tests: exit status 2\n"),
    "not collected": ("import nothing_of_that_name\n", 1, "failed twice: test_it.py\n"),
    "all passed": (FINE, 1, "did not end with failed tests: exit status 0\n"),
}


@pytest.mark.parametrize("case", CASES)
def test_only_tests_that_pass_the_second_time_are_flaky(tmp_path: Path, case: str) -> None:
    source, exit_code, last = CASES[case]
    (tmp_path / "test_it.py").write_text(source)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_sessionfinish\n")
    (tmp_path / "pytest.ini").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )

    run("pytest", "-n", "2")
    repeated = run("tests.maintenance.repeat_failed")
    assert (repeated.returncode, repeated.stdout[-len(last) :]) == (exit_code, last), repeated.stdout
