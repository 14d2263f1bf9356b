"""Fixture: a run that passes all checks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tiny_run import write_tiny_run


@pytest.fixture(scope="session")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preflight")
    (folder / "run.json").write_text(json.dumps(write_tiny_run(folder)))
    return folder


@pytest.fixture
def tree(master: Path, tmp_path: Path) -> dict[str, Any]:
    """A run for each test to damage."""
    shutil.copytree(master, tmp_path, dirs_exist_ok=True)
    content: dict[str, Any] = json.loads((master / "run.json").read_text().replace(str(master), str(tmp_path)))
    return content
