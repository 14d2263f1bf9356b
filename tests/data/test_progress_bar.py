"""The progress bar of data loading."""

from __future__ import annotations

import pytest

from megarl.data.progress_bar import track


def test_batches_pass_through_and_nothing_is_printed_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [[1, 2], [3]]
    assert list(track(batches, "counting", quiet_seconds=0.0)) == batches
    assert capsys.readouterr() == ("", "")


def test_long_work_shows_the_row_count_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    assert list(track([[1, 2], [3]], "counting", quiet_seconds=0.0)) == [[1, 2], [3]]
    assert "3 rows" in capsys.readouterr().err


def test_errors_pass_through() -> None:
    def failing():
        yield [1]
        raise KeyError("x")

    with pytest.raises(KeyError):
        list(track(failing(), "counting"))
