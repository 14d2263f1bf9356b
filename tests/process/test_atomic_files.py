from __future__ import annotations

from pathlib import Path

import pytest

from megarl.process.atomic_files import replaced


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.txt"
    with replaced(path) as draft:
        draft.write_text("old")
        assert not path.exists()
    with pytest.raises(UnicodeEncodeError), replaced(path) as draft:
        draft.write_text("new \ud800", encoding="utf-8")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]
