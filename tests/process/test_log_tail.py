from megarl.process.log_tail import MOST_BYTES, end_of


def test_a_short_log_is_read_as_a_whole(tmp_path):
    log = tmp_path / "log"
    log.write_text("")
    assert end_of(log) == ""
    log.write_text("first\nsecond\n\n")
    assert end_of(log) == "first\nsecond"


def test_of_a_long_log_whole_lines_at_its_end_are_read(tmp_path):
    lines = [f"{n} is one of many lines, in UTF-8: \u00e9\u4e2d" for n in range(20_000)]
    (tmp_path / "log").write_text("\n".join(lines))
    text = end_of(tmp_path / "log")
    assert MOST_BYTES - 100 < len(text.encode()) <= MOST_BYTES
    assert lines[-text.count("\n") - 1 :] == text.splitlines()
