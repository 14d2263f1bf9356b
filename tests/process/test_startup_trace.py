from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megarl.process import startup_trace
from megarl.process.startup_trace import Diary, importing


@pytest.fixture(autouse=True)
def _nothing_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_trace, "_imports", [])


def test_what_a_call_brings_is_imported_since_it_was_asked_for_and_the_process_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 15.0, 16.0, 18.0, 18.5, 20.0, 27.0, 27.0, 30.0])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    diary = Diary()  # there at 10
    with diary.building(asked=4.0), importing():  # called at 15, builds from 16; imports from 18 to 18.5, done at 20
        pass
    with diary.building(asked=19.0):  # called at 27
        pass
    start = diary.read()
    assert start.there == 10.0
    assert start.imports == ((10.0, 15.0), (18.0, 18.5), (20.0, 27.0))
    assert start.builds == ((16.0, 20.0), (27.0, 30.0))


def test_a_process_knows_when_it_was_created() -> None:
    program = "import time; time.sleep(0.5); from megarl.process import startup_trace as p; print(p.process_created())"
    before = time.time()
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert before - 0.05 <= float(child.stdout) <= time.time() - 0.5
