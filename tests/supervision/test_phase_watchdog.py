"""Phase timeouts, with a fake Ray; tests/workers/test_group.py covers them with real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megarl.errors import HungWorkerError, WorkerError
from megarl.supervision.phase_watchdog import PhaseWatchdog
from megarl.workers import failures
from tests.time_limits import UNREACHED_SECONDS, wait_until


class FakeRay:
    """A fake Ray whose references are ready as `is_ready` says."""

    def __init__(self, patch: pytest.MonkeyPatch, is_ready: Callable[[str], bool]) -> None:
        self._is_ready, self.num_waits = is_ready, 0
        patch.setattr(failures, "ray", self)
        patch.setattr(failures, "POLL_SECONDS", 0.005)

    def wait(self, refs: Sequence[str], *, num_returns: int, timeout: float | None) -> tuple[list[str], list[str]]:
        self.num_waits += 1
        done = [ref for ref in refs if self._is_ready(ref)][:num_returns]
        if not done:
            time.sleep(0.005)
        return done, [ref for ref in refs if ref not in done]

    def get(self, refs: str | list[str]) -> str | list[str]:
        return refs


def wait_all(*ranks: str, timeout: float | None = None) -> list[str]:
    return failures.wait_all(ranks, what="train", names={name: f"rank {name}" for name in ranks}, timeout=timeout)


def test_late_phase_fails_with_rank_names_once_the_stacks_are_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Recovery from the failure may end the processes whose stacks are collected."""
    messages: list[str] = []
    ray = FakeRay(monkeypatch, lambda ref: ref in "02")

    def collect() -> str:
        before = ray.num_waits
        assert wait_until(lambda: ray.num_waits > before + 3), "the phase has failed before"
        return "the workers' stacks"

    watchdog = PhaseWatchdog(0.1, messages.append, collect, tmp_path)
    file = tmp_path / "stacks" / "step-000012-train.txt"
    with pytest.raises(HungWorkerError) as error, watchdog.phase(12, "train"):
        wait_all("0", "1", "2", "3")
    what = "train of step 12 took longer than 0.1 s"
    assert str(error.value) == f"{what}; no answer from rank 1, rank 3; stacks: {file}"
    text = file.read_text()
    assert text.startswith(f"{what}; no answer from rank 1, rank 3\n")
    assert "the workers' stacks" in text
    assert ", in wait_all" in text, "the controller's own stack is missing"
    assert [line.split(";")[0] for line in messages] == [what] * 2


@pytest.mark.parametrize("seconds", [None, UNREACHED_SECONDS])
def test_phases_within_the_timeout_are_not_affected(
    seconds: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    messages: list[str] = []
    watchdog = PhaseWatchdog(seconds, messages.append, lambda: "", tmp_path)
    FakeRay(monkeypatch, lambda ref: ref != "late")
    for _ in range(3):
        with watchdog.phase(1, "train"):
            assert wait_all("0", "1") == ["0", "1"]
    assert wait_until(lambda: "phase watchdog" not in {thread.name for thread in threading.enumerate()})
    assert messages == []
    late = pytest.raises(WorkerError, match=r"^train: no answer within 0\.1 s from rank late$")
    with late:
        wait_all("0", "late", timeout=0.1)
    with late, watchdog.phase(1, "train"):  # the shorter time limit applies first
        wait_all("late", timeout=0.1)


def test_phase_fails_even_if_stacks_cannot_be_collected_or_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> str:
        raise WorkerError("no node answers")

    FakeRay(monkeypatch, lambda ref: False)
    with pytest.raises(WorkerError, match="stacks: "), PhaseWatchdog(0.1, print, fail, tmp_path).phase(1, "train"):
        wait_all("0")
    text = (tmp_path / "stacks/step-000001-train.txt").read_text()
    assert "could not collect the stacks of workers: WorkerError: no node answers" in text
    (tmp_path / "file").write_text("")
    watchdog = PhaseWatchdog(0.1, print, lambda: "", tmp_path / "file")
    message = "no answer from rank 0; stacks could not be written: "
    with pytest.raises(WorkerError, match=message), watchdog.phase(1, "train"):
        wait_all("0")


def test_outer_phase_can_fail_after_an_inner_phase_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    messages: list[str] = []
    outer = PhaseWatchdog(0.1, messages.append, lambda: "", tmp_path)
    inner = PhaseWatchdog(UNREACHED_SECONDS, print, lambda: "", tmp_path)
    # ready once the outer phase is too late
    FakeRay(monkeypatch, lambda ref: ref == "0" and len(messages) == 2)

    def step() -> None:
        with inner.phase(1, "train"):
            assert wait_all("0") == ["0"]
        wait_all("1")

    message = r"^step of step 1 took longer than 0\.1 s; no answer from rank 1;"
    with pytest.raises(WorkerError, match=message), outer.phase(1, "step"):
        step()
