"""Atomic writes, and the last lines of log files."""

import pytest

from megarl.cluster.process.atomic_files import MAX_BYTES, atomic_write, tail


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "sub" / "a.txt"
    with atomic_write(path) as draft:
        draft.write_text("old")
        assert not path.exists()
    with pytest.raises(UnicodeEncodeError), atomic_write(path) as draft:
        draft.write_text("new \ud800", encoding="utf-8")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_short_log_is_read_completely(tmp_path):
    log = tmp_path / "log"
    log.write_text("")
    assert tail(log) == ""
    log.write_text("first\nsecond\n\n")
    assert tail(log) == "first\nsecond"


def test_last_complete_lines_of_a_long_log_are_read(tmp_path):
    lines = [f"{n} is one of many lines, in UTF-8: \u00e9\u4e2d" for n in range(20_000)]
    (tmp_path / "log").write_text("\n".join(lines))
    text = tail(tmp_path / "log")
    assert MAX_BYTES - 100 < len(text.encode()) <= MAX_BYTES
    assert lines[-text.count("\n") - 1 :] == text.splitlines()
