"""Phase timeouts, with a fake Ray; tests/workers/test_group.py covers them with real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.errors import HungWorkerError, WorkerError
from megarl.supervision.phase_watchdog import PhaseWatchdog
from megarl.workers import failures
from tests.time_limits import HANG_SECONDS


class FakeRay:
    """A fake Ray whose references become ready after the given seconds."""

    def __init__(self, over: dict[str, float]) -> None:
        self._over = {name: time.monotonic() + seconds for name, seconds in over.items()}

    def wait(self, refs: Sequence[str], *, num_returns: int, timeout: float | None) -> tuple[list[str], list[str]]:
        ends = time.monotonic() + (6000.0 if timeout is None else timeout)
        while True:
            done = [ref for ref in refs if self._over[ref] <= time.monotonic()][:num_returns]
            if len(done) == num_returns or time.monotonic() >= ends:
                return done, [ref for ref in refs if ref not in done]
            time.sleep(0.005)

    def get(self, refs: str | list[str]) -> str | list[str]:
        return refs


def wait_all_refs(monkeypatch: pytest.MonkeyPatch, over: dict[str, float], timeout: float | None = None) -> list[str]:
    monkeypatch.setattr(failures, "ray", FakeRay(over))
    monkeypatch.setattr(failures, "POLL_SECONDS", 0.05)
    return failures.wait_all(list(over), what="train", names={name: f"rank {name}" for name in over}, timeout=timeout)


def test_late_phase_fails_with_rank_names_and_stacks_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    messages: list[str] = []
    watchdog = PhaseWatchdog(1.0, messages.append, lambda: "the workers' stacks", tmp_path)
    file = tmp_path / "stacks" / "step-000012-train.txt"
    with pytest.raises(HungWorkerError) as error, watchdog.phase(12, "train"):
        wait_all_refs(monkeypatch, {"0": 0.0, "1": 6000.0, "2": 0.1, "3": 6000.0})
    assert str(error.value) == (f"train of step 12 took longer than 1 s; no answer from rank 1, rank 3; stacks: {file}")
    text = file.read_text()
    assert text.startswith("train of step 12 took longer than 1 s; no answer from rank 1, rank 3\n")
    assert "the workers' stacks" in text
    assert ", in wait_all" in text, "the controller's own stack is missing"
    assert [line.split(";")[0] for line in messages] == ["train of step 12 took longer than 1 s"] * 2


def test_stacks_are_written_before_the_phase_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Recovery from the failure may end the processes whose stacks are collected."""
    read = threading.Event()

    def collect_slowly() -> str:
        time.sleep(0.4)
        read.set()
        return "stacks"

    with pytest.raises(WorkerError), PhaseWatchdog(0.1, print, collect_slowly, tmp_path).phase(1, "train"):
        wait_all_refs(monkeypatch, {"0": 6000.0})
    assert read.is_set()


def test_phases_within_the_timeout_are_not_affected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    messages: list[str] = []
    watchdog = PhaseWatchdog(1.5, messages.append, lambda: "", tmp_path)
    for _ in range(3):
        with watchdog.phase(1, "train"):
            assert wait_all_refs(monkeypatch, {"0": 0.15, "1": 0.2}) == ["0", "1"]
    time.sleep(1.6)
    assert messages == []
    assert "phase watchdog" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(WorkerError, match=r"^train: no answer within 0\.2 s from rank 1$"):
        wait_all_refs(monkeypatch, {"0": 0.0, "1": 6000.0}, timeout=0.2)


def test_shorter_call_timeout_applies_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerError, match=r"^train: no answer within 0\.12 s from rank 0$"),
        PhaseWatchdog(HANG_SECONDS, print, lambda: "", tmp_path).phase(1, "train"),
    ):
        wait_all_refs(monkeypatch, {"0": 6000.0}, timeout=0.12)


def test_phase_without_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with PhaseWatchdog(None, print, lambda: "", tmp_path).phase(1, "train"):
        assert wait_all_refs(monkeypatch, {"0": 0.3}) == ["0"]


def test_phase_fails_even_if_stacks_cannot_be_collected_or_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> str:
        raise WorkerError("no node answers")

    with pytest.raises(WorkerError, match="stacks: "), PhaseWatchdog(0.1, print, fail, tmp_path).phase(1, "train"):
        wait_all_refs(monkeypatch, {"0": 6000.0})
    assert (
        "could not collect the stacks of workers: WorkerError: no node answers"
        in (tmp_path / "stacks/step-000001-train.txt").read_text()
    )
    (tmp_path / "file").write_text("")
    watchdog = PhaseWatchdog(0.1, print, lambda: "", tmp_path / "file")
    with (
        pytest.raises(WorkerError, match="no answer from rank 0; stacks could not be written: "),
        watchdog.phase(1, "train"),
    ):
        wait_all_refs(monkeypatch, {"0": 6000.0})


def test_outer_phase_can_fail_after_an_inner_phase_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outer = PhaseWatchdog(0.2, print, lambda: "", tmp_path)
    inner = PhaseWatchdog(HANG_SECONDS, print, lambda: "", tmp_path)

    def step() -> None:
        with inner.phase(1, "train"):
            assert wait_all_refs(monkeypatch, {"0": 0.4}) == ["0"]
        wait_all_refs(monkeypatch, {"1": 6000.0})

    message = r"^step of step 1 took longer than 0\.2 s; no answer from rank 1;"
    with pytest.raises(WorkerError, match=message), outer.phase(1, "step"):
        step()
