"""The startup trace of a process."""

from __future__ import annotations

import time

import psutil
import pytest

from megarl.process import startup_trace
from megarl.process.startup_trace import StartupTrace, record_imports


@pytest.fixture(autouse=True)
def _clear_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_trace, "_imports", [])


def test_imports_of_a_call_begin_when_it_was_requested_and_the_process_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 15.0, 16.0, 18.0, 18.5, 20.0, 27.0, 27.0, 30.0])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    trace = StartupTrace()  # ready at 10
    with (
        trace.record_build(requested_at=4.0),
        record_imports(),
    ):  # called at 15, builds from 16; imports from 18 to 18.5, done at 20
        pass
    with trace.record_build(requested_at=19.0):  # called at 27
        pass
    timing = trace.snapshot()
    assert timing.ready_at == 10.0
    assert timing.imports == ((10.0, 15.0), (18.0, 18.5), (20.0, 27.0))
    assert timing.builds == ((16.0, 20.0), (27.0, 30.0))


def test_process_creation_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds_after_boot = psutil.Process().create_time() - psutil.boot_time()
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: seconds_after_boot + 5000}.get)
    monkeypatch.setattr(time, "time", lambda: 1e6)
    # the time of the boot is in full seconds
    assert startup_trace.process_creation_time() == pytest.approx(1e6 - 5000, abs=1.5)
