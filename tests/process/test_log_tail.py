"""The last lines of log files."""

from megarl.process.log_tail import MAX_BYTES, tail


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
