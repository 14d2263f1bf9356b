"""Phase timeouts with a fake Ray, and the monitor of a run; tests/cluster/workers/test_group.py has real processes."""

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from megarl.cluster.workers import failures
from megarl.cluster.workers.failures import run_abort_check
from megarl.errors import HungWorkerError, WorkerError
from megarl.run.supervision import run_monitor
from megarl.run.supervision.run_monitor import STACKS_FOLDER, PhaseWatchdog, RunMonitor
from tests import fake_ray
from tests.errors import expect_error
from tests.run.finished_groups import run_config
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_until


class FakeRay:
    """A fake Ray whose references are ready as `is_ready` says."""

    def __init__(self, patch, is_ready):
        self._is_ready, self.num_waits = is_ready, 0
        patch.setattr(failures, "ray", self)
        patch.setattr(failures, "POLL_SECONDS", 0.005)
        patch.setattr(failures, "NUM_LOOKS", 10**9)

    def wait(self, refs, *, num_returns, timeout):
        self.num_waits += 1
        done = [ref for ref in refs if self._is_ready(ref)][:num_returns]
        if not done:
            time.sleep(0.005)
        return done, [ref for ref in refs if ref not in done]

    def get(self, refs):
        return refs


def wait_all(*ranks, timeout=None):
    return failures.wait_all(ranks, what="train", names={name: f"rank {name}" for name in ranks}, timeout=timeout)


def test_late_phase_fails_with_rank_names_once_the_stacks_are_on_disk(monkeypatch, tmp_path):
    """Recovery from the failure may end the processes whose stacks are collected."""
    messages = []
    ray = FakeRay(monkeypatch, lambda ref: ref in "02")

    def collect():
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
def test_phases_within_the_timeout_are_not_affected(seconds, monkeypatch, tmp_path):
    messages = []
    watchdog = PhaseWatchdog(seconds, messages.append, lambda: "", tmp_path)
    FakeRay(monkeypatch, lambda ref: ref != "late")
    for _ in range(3):
        with watchdog.phase(1, "train"):
            assert wait_all("0", "1") == ["0", "1"]
    assert wait_until(lambda: "phase watchdog" not in {thread.name for thread in threading.enumerate()})
    assert messages == []
    late = partial(expect_error, WorkerError, "0.1", "answer", "within")
    with late():
        wait_all("0", "late", timeout=0.1)
    with late(), watchdog.phase(1, "train"):  # the shorter time limit applies first
        wait_all("late", timeout=0.1)


def test_phase_fails_even_if_stacks_cannot_be_collected_or_written(monkeypatch, tmp_path):
    def fail():
        raise WorkerError("no node answers")

    FakeRay(monkeypatch, lambda ref: False)
    with pytest.raises(WorkerError, match="stacks: "), PhaseWatchdog(0.1, print, fail, tmp_path).phase(1, "train"):
        wait_all("0")
    text = (tmp_path / "stacks/step-000001-train.txt").read_text()
    assert "could not collect the stacks of workers: WorkerError: no node answers" in text
    (tmp_path / "file").write_text("")
    watchdog = PhaseWatchdog(0.1, print, lambda: "", tmp_path / "file")
    with expect_error(WorkerError, "rank 0", "stacks could not be written: "), watchdog.phase(1, "train"):
        wait_all("0")


def test_outer_phase_can_fail_after_an_inner_phase_has_ended(monkeypatch, tmp_path):
    messages = []
    outer = PhaseWatchdog(0.1, messages.append, lambda: "", tmp_path)
    inner = PhaseWatchdog(UNREACHED_SECONDS, print, lambda: "", tmp_path)
    FakeRay(monkeypatch, lambda ref: ref == "0" and len(messages) == 2)  # ready once the outer phase is too late

    def step():
        with inner.phase(1, "train"):
            assert wait_all("0") == ["0"]
        wait_all("1")

    with expect_error(WorkerError, "step of step 1", "0.1 s", "rank 1;"), outer.phase(1, "step"):
        step()


@pytest.fixture
def monitor(tmp_path):
    config = run_config(
        {"type": "grpo"},
        run_dir=str(tmp_path),
        recovery={"phase_timeout_seconds": 0.1},
        placement={"start_timeout_seconds": 0.1},
        rollout={"engine": {"start_timeout_seconds": 0.2}},
    )
    monitor_instance = RunMonitor(config, lambda _: None)
    yield monitor_instance
    monitor_instance.close(None)


def test_stacks_are_collected_from_replaced_processes(monitor, monkeypatch):
    queried = []

    def find(actors, timeout):
        queried.append(list(actors.values()))
        return {name: f"info of {actor}" for name, actor in actors.items() if actor != "starts"}

    monkeypatch.setattr(run_monitor, "find_processes", find)
    monkeypatch.setattr(run_monitor, "collect_stacks", lambda processes: str(sorted(processes.items())))
    engines = {"engine 0": "first", "engine 1": "second"}
    trainer = SimpleNamespace(processes=lambda: {"trainer rank 0": SimpleNamespace(host="n")})
    monitor.watch(trainer, lambda: engines)
    trainer_info = str(next(iter(trainer.processes().items())))
    assert (
        monitor.collect_stacks() == f"[('engine 0', 'info of first'), ('engine 1', 'info of second'), {trainer_info}]"
    )
    engines |= {"engine 0": "starts", "engine 1": "third"}
    for _ in range(2):
        assert monitor.collect_stacks() == f"[('engine 1', 'info of third'), {trainer_info}]"
    assert queried == [["first", "second"], [], ["starts", "third"], ["starts"]]


def test_silent_processes_are_located_within_one_time_limit(monitor, monkeypatch):
    ray = fake_ray.FakeRay()
    monkeypatch.setattr(failures, "ray", ray)
    monkeypatch.setattr(failures, "time", ray)
    lost = fake_ray.Ref(is_done=True)
    lost.value = ActorDiedError()
    answers = {f"engine {n}": fake_ray.Ref() for n in range(100)} | {"engine 0": lost}
    answers["engine 7"].end(SimpleNamespace(host="n"))
    actors = {
        name: SimpleNamespace(process_info=SimpleNamespace(remote=lambda ref=ref: ref)) for name, ref in answers.items()
    }
    monitor.watch(SimpleNamespace(processes=dict), lambda: actors)
    assert ray.now - fake_ray.FakeRay().now == pytest.approx(run_monitor.LOCATE_TIMEOUT_SECONDS)
    assert list(monitor._processes) == ["engine 7"]


def test_hung_start_fails_after_start_timeouts_plus_phase_timeout(monitor, tmp_path):
    started_at = time.monotonic()

    def start():
        with monitor.start(13):
            while time.monotonic() < started_at + HANG_SECONDS:
                run_abort_check(lambda: ["rank 1"])
                time.sleep(0.01)

    message = r"^start of step 13 took longer than 0\.4 s; no answer from rank 1; stacks: "
    with pytest.raises(WorkerError, match=message):
        start()
    assert time.monotonic() - started_at >= 0.4
    assert (tmp_path / STACKS_FOLDER / "step-000013-start.txt").exists()
