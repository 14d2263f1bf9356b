"""Tests that shellcheck accepts all scripts in launch/ and examples/."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPTS = sorted(
    path for name in ("launch", "examples") for path in (ROOT / name).rglob("*") if path.suffix in {".sh", ".sbatch"}
)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: make setup-test-tools")
def test_shellcheck_finds_no_problems():
    assert SCRIPTS
    done = subprocess.run(
        ["shellcheck", "--external-sources", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
