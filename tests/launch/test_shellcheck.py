"""Tests that shellcheck accepts all scripts in launch/ and examples/."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.required_tools import skip_or_fail

ROOT = Path(__file__).parents[2]

SCRIPTS = sorted(
    path for name in ("launch", "examples") for path in (ROOT / name).rglob("*") if path.suffix in {".sh", ".sbatch"}
)


def test_shellcheck_finds_no_problems():
    if shutil.which("shellcheck") is None:
        skip_or_fail("needs shellcheck: make setup-test-tools")
    assert SCRIPTS
    done = subprocess.run(
        ["shellcheck", "--external-sources", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
