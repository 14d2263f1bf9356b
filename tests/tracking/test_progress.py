"""Progress output."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megarl.tracking.progress import RunProgress, StepSummary, format_si

SUMMARY = StepSummary(
    step=3,
    seconds=5.07,
    reward=0.625,
    evaluation=0.8533,
    tokens_per_second=4210.0,
    weight_sync_seconds=0.041,
    weight_sync_bytes=1_971_712,
)


def test_without_a_terminal_lines_are_plain_and_phases_hidden() -> None:
    out = io.StringIO()
    with RunProgress(40, Console(file=out, width=20)) as progress:
        progress.phase(3, "rollout")
        progress.done(SUMMARY)
        progress.notify("wrote [run]/model")
    assert out.getvalue() == (
        "step  3/40  reward 0.625  eval 0.853  4.21 ktok/s  sync 0.04 s 1.97 MB  5.1 s\nwrote [run]/model\n"
    )


def test_on_a_terminal_the_phase_is_shown_and_erased() -> None:
    out = io.StringIO()
    with RunProgress(40, Console(file=out, force_terminal=True, width=100)) as progress:
        progress.phase(3, "rollout")
        progress.phase(4, "training")
        progress.done(SUMMARY)
    written = out.getvalue()
    assert "step 4/40 training" in written
    assert "eval" in written
    assert written.endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the cursor is back, the spinner's line erased"


def test_unknown_figures_are_left_out() -> None:
    assert StepSummary(step=1, seconds=1.0, loss=2.34567).text(300) == "step   1/300  loss 2.3457  1.0 s"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 "), (512, "512 "), (999, "999 "), (999.6, "1.00 k"), (1234, "1.23 k"), (12_345, "12.3 k"),
     (123_456, "123 k"), (999_600, "1.00 M"), (2_050_000, "2.05 M"), (16e9, "16.0 G"), (5e15, "5000 T")],
)  # fmt: skip
def test_format_si(number: float, text: str) -> None:
    assert format_si(number) == text


@given(st.floats(1, 1e14))
def test_format_si_keeps_three_digits(number: float) -> None:
    digits, _, prefix = format_si(number).partition(" ")
    factor = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[prefix]
    assert float(digits) * factor == pytest.approx(number, rel=0.006, abs=0.51)
