"""What a run reports: progress output, the startup report, and the summary."""

import io
import json
import math
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megarl.cluster.process.process_start import StartupTiming
from megarl.errors import ConfigError
from megarl.tracking.progress import RunProgress, RunSummary, StepSummary, format_si
from megarl.tracking.timing import KINDS, Span, Startup, command_startup, seconds_by_kind
from tests.errors import expect_error

SUMMARY = StepSummary(
    step=3,
    seconds=5.07,
    reward=0.625,
    evaluation=0.8533,
    tokens_per_second=4210.0,
    weight_sync_seconds=0.041,
    weight_sync_bytes=1_971_712,
)


def test_without_a_terminal_lines_are_plain_and_phases_hidden():
    out = io.StringIO()
    with RunProgress(40, Console(file=out, width=20)) as progress:
        progress.phase(3, "rollout")
        progress.done(SUMMARY)
        progress.notify("wrote [run]/model")
    assert out.getvalue() == (
        "step  3/40  reward 0.625  eval 0.853  4.21 ktok/s  sync 0.04 s 1.97 MB  5.1 s\nwrote [run]/model\n"
    )


def test_on_a_terminal_the_phase_is_shown_and_erased():
    out = io.StringIO()
    with RunProgress(40, Console(file=out, force_terminal=True, width=100)) as progress:
        progress.phase(3, "rollout")
        progress.phase(4, "training")
        progress.done(SUMMARY)
    written = out.getvalue()
    assert "step 4/40 training" in written
    assert "eval" in written
    assert written.endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the cursor is back, the spinner's line erased"


def test_unknown_figures_are_left_out():
    assert StepSummary(step=1, seconds=1.0, loss=2.34567).text(300) == "step   1/300  loss 2.3457  1.0 s"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 "), (512, "512 "), (999, "999 "), (999.6, "1.00 k"), (1234, "1.23 k"), (12_345, "12.3 k"),
     (123_456, "123 k"), (999_600, "1.00 M"), (2_050_000, "2.05 M"), (16e9, "16.0 G"), (5e15, "5000 T")],
)  # fmt: skip
def test_format_si(number, text):
    assert format_si(number) == text


@given(st.floats(1, 1e14))
def test_format_si_keeps_three_digits(number):
    digits, _, prefix = format_si(number).partition(" ")
    factor = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[prefix]
    assert float(digits) * factor == pytest.approx(number, rel=0.006, abs=0.51)


INSTANTS = 24
SPANS = st.lists(
    st.builds(
        lambda kind, begin, length: Span("", kind, float(begin), float(begin + length)),
        st.sampled_from(KINDS),
        st.integers(-4, INSTANTS + 4),
        st.integers(0, 12),
    ),
    max_size=8,
)


@given(spans=SPANS, begin=st.integers(0, INSTANTS), length=st.integers(0, INSTANTS))
def test_every_instant_is_assigned_to_the_first_kind_that_applies(spans, begin, length):
    expected = dict.fromkeys(KINDS, 0.0)
    for instant in range(begin, begin + length):
        if kinds := [span.kind for span in spans if span.begin <= instant < span.end]:
            expected[min(kinds, key=KINDS.index)] += 1.0
    assert seconds_by_kind(spans, begin, begin + length) == expected


def make_startup() -> Startup:
    """Return a startup: 10 s before the command, which takes 3 s, then two ranks concurrent with an engine."""
    startup = Startup(100.0)
    startup.add("launch", "launch", [(100.0, 110.0)])
    startup.add("command", "imports", [(110.0, 113.0)])
    ranks = [
        StartupTiming(ready_at=115.0, imports=((115.0, 118.0),), builds=((116.0, 120.0),)),
        StartupTiming(ready_at=116.0, imports=((116.0, 118.5),), builds=((118.5, 121.0),)),
    ]
    startup.add_processes("trainer ranks", ranks, requested_at=113.0, builds="megarl")
    engine = StartupTiming(ready_at=115.0, imports=((115.0, 117.0),), builds=((117.0, 125.0),))
    startup.add_processes("rollout engines", [engine], requested_at=113.0, builds="sglang")
    return startup


def test_kinds_add_up_to_the_total(tmp_path):
    report = make_startup().finish("first completion", 130.0)
    # no process is ready until 115, the second rank until 116; then 2.5 s of imports
    assert report.by_kind == {"launch": 10.0, "imports": 3 + 3.5, "ray": 2.0, "sglang": 125 - 118.5, "megarl": 5.0}
    assert report.seconds == sum(report.by_kind.values()) == 30.0
    assert report.line == "started in 30.0 s: launch 10.0, imports 6.5, Ray 2.0, SGLang 6.5, megarl 5.0"
    report.write(tmp_path / "startup.json")
    tree = json.loads((tmp_path / "startup.json").read_text())
    assert (tree["until"], tree["seconds"]) == ("first completion", 30.0)
    assert [(phase["name"], phase["begin"], phase["seconds"]) for phase in tree["phases"]] == [
        ("launch", 0.0, 10.0),
        ("command", 10.0, 3.0),
        ("trainer ranks", 13.0, 8.0),
        ("rollout engines", 13.0, 12.0),
        ("first completion", 25.0, 5.0),
    ]
    ranks = tree["phases"][2]["by_kind"]
    assert ranks == {"imports": 3.5, "ray": 2.0, "sglang": 0.0, "megarl": 2.5}


def test_line_and_file_have_the_same_times(tmp_path):
    """0.1504 s are 0.15 s in the file, which is a tenth of a second less in the line than 0.1504 s."""
    startup = Startup(0.0)
    startup.add("command", "imports", [(0.0, 0.1504)])
    report = startup.finish("first completion", 1.0)
    report.write(tmp_path / "startup.json")
    imports = json.loads((tmp_path / "startup.json").read_text())["by_kind"]["imports"]
    assert report.line.startswith(f"started in 1.0 s: imports {imports:.1f}, ")


def test_report_without_a_launcher_omits_it():
    startup = Startup(0.0)
    startup.add("command", "imports", [(0.0, 1.0)])
    assert (
        startup.finish("first completion", 2.0).line == "started in 2.0 s: imports 1.0, Ray 0.0, SGLang 0.0, megarl 1.0"
    )


def test_command_startup_begins_with_its_process_or_launcher(monkeypatch):
    created = psutil.Process().create_time()  # to the second
    monkeypatch.setattr("megarl.tracking.timing.process_creation_time", lambda: created)
    monkeypatch.delenv("MEGARL_STARTED", raising=False)
    before = time.time()
    without_launcher = command_startup()
    assert without_launcher.begin == created
    (command,) = without_launcher.spans
    assert (command.phase, command.kind, command.begin) == ("command", "imports", created)
    assert before <= command.end <= time.time()
    monkeypatch.setenv("MEGARL_STARTED", str(created - 7.5))
    first = command_startup().spans[0]
    assert (first.phase, first.begin, first.end) == ("launch", created - 7.5, created)
    monkeypatch.setenv("MEGARL_STARTED", str(created + 1000))
    assert command_startup().begin == created
    monkeypatch.setenv("MEGARL_STARTED", "noon")
    with expect_error(ConfigError, "MEGARL_STARTED", "Unix", "'noon'"):
        command_startup()


def test_summary_is_valid_json(tmp_path):
    numbers = {"eval_before": 0.35, "eval_after": None, "steps": 40, "steps_planned": 50, "seconds_total": 61.5}
    numbers |= {"tokens_per_second": 1234.5, "weight_sync_bytes": 80_000_000}
    phases = {"rollout": 30.0, "train": math.nan}
    RunSummary(**numbers, seconds_by_phase=phases, logprob_abs_max=math.inf).write(tmp_path / "summary.json")
    found = json.loads((tmp_path / "summary.json").read_text(), parse_constant=lambda name: 1 / 0)
    assert found == numbers | {"seconds_by_phase": {"rollout": 30.0, "train": None}, "logprob_abs_max": None}
