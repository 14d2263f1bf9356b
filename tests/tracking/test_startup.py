"""The startup report."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import ConfigError
from megarl.process.startup_trace import StartupTiming
from megarl.tracking.startup import KINDS, Span, Startup, command_startup, seconds_by_kind

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
def test_every_instant_is_assigned_to_the_first_kind_that_applies(spans: list[Span], begin: int, length: int) -> None:
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


def test_kinds_add_up_to_the_total(tmp_path: Path) -> None:
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


def test_report_without_a_launcher_omits_it() -> None:
    startup = Startup(0.0)
    startup.add("command", "imports", [(0.0, 1.0)])
    assert (
        startup.finish("first completion", 2.0).line == "started in 2.0 s: imports 1.0, Ray 0.0, SGLang 0.0, megarl 1.0"
    )


def test_command_startup_begins_with_its_process_or_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    created = psutil.Process().create_time()  # to the second
    monkeypatch.setattr("megarl.tracking.startup.process_creation_time", lambda: created)
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
    with pytest.raises(ConfigError, match=r"^MEGARL_STARTED needs the Unix time at which the start began, got 'noon'$"):
        command_startup()
