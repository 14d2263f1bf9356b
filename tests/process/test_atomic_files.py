"""Atomic file writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.process.atomic_files import atomic_write


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.txt"
    with atomic_write(path) as draft:
        draft.write_text("old")
        assert not path.exists()
    with pytest.raises(UnicodeEncodeError), atomic_write(path) as draft:
        draft.write_text("new \ud800", encoding="utf-8")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]
