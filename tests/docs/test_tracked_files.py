"""No tracked file depends on a folder outside the checkout."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

THIS = Path(__file__)
ROOT = THIS.parents[2]
OUTSIDE = re.compile(r"\.\./shared\b|/home/(?!any\b)\w+|/Users/\w+|/root/\w+")
"""A folder beside the checkout, or somebody's home folder; /home/any is made by the container image."""


def outside_paths(text: str) -> list[str]:
    return OUTSIDE.findall(text)


@pytest.mark.parametrize("text", ["path: ../shared/data", "cd /home/someone/megarl", "'/Users/someone'", "/root/cache"])
def test_paths_outside_the_checkout_are_found(text: str) -> None:
    assert outside_paths(text)


def test_no_tracked_file_names_a_folder_outside_the_checkout() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    files = [
        ROOT / name for name in listed.stdout.split("\0") if name and name != str(Path(__file__).relative_to(ROOT))
    ]
    assert len(files) > 500
    found = {
        str(file.relative_to(ROOT)): outside_paths(file.read_text())
        for file in files
        if file.is_file() and file != THIS
    }
    assert {name: paths for name, paths in found.items() if paths} == {}
