"""The driver, which shows a run and forwards requests, the controller, and the ranks of torchrun."""

import json
import os
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.checkpoint import run_lock
from megarl.checkpoint.run_lock import LOCK_TIMEOUT_SECONDS, RunLock, require_lock
from megarl.cluster.process.launcher_env import TorchrunWorld
from megarl.cluster.workers.failures import run_abort_check
from megarl.config import SftConfig
from megarl.config.load import make_config
from megarl.config.placement import PlacementConfig
from megarl.controller import actor, ray_session, run_stage, spmd_stage
from megarl.controller.actor import Controller
from megarl.controller.ray_session import acquire_when_free, discarded_native_stderr
from megarl.controller.replay import ReplayReport
from megarl.controller.run_stage import begin_run, follow, start_controller
from megarl.errors import ConfigError, LostLockError, MegarlError
from megarl.tracking.progress import EventLog, MessageEvent
from megarl.tracking.timing import Startup
from tests.checkpoint.run_folder import take_over
from tests.errors import expect_error
from tests.run.finished_groups import run_config
from tests.time_limits import HANG_SECONDS


class FakeController:
    """Fake controller actor of a run that ends after `num_polls` polls; its calls return at once."""

    def __init__(self, num_polls: int) -> None:
        self.left, self.log, self.stop_requests = num_polls, EventLog(), list[str]()
        self.events = SimpleNamespace(remote=self.log.since)
        self.request_stop = SimpleNamespace(remote=self.stop_requests.append)

    def has_ended(self) -> bool:
        self.left -= 1
        self.log.add(MessageEvent(f"{self.left} left"))
        return self.left == 0


def sft_config(folder: Path) -> SftConfig:
    return make_config(SftConfig, {"run_dir": str(folder), "model": {"path": "m"}, "data": {"path": "d"}})


def test_all_events_until_the_end_are_shown(monkeypatch):
    monkeypatch.setattr(run_stage, "ray", SimpleNamespace(get=lambda answer: answer))
    controller, messages = FakeController(4), list[str]()
    signals = iter(["", "", "SIGUSR1", ""])
    progress: Any = SimpleNamespace(notify=messages.append)
    stop_request: Any = SimpleNamespace(signal_name=lambda: next(signals))
    follow(controller, controller.has_ended, progress, stop_request)
    notice = "early end requested: the run stops after the current step"
    assert messages == ["3 left", "2 left", notice, "1 left", "0 left"]
    assert controller.stop_requests == ["SIGUSR1", "SIGUSR1"]


def test_the_controller_checks_the_lock_that_its_driver_holds(tmp_path, monkeypatch):
    created = list[tuple[Any, ...]]()
    hosted = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *arguments: created.append(arguments)))
    node = SimpleNamespace(get_node_id=lambda: "0" * 56)
    fake = SimpleNamespace(get_runtime_context=lambda: node, remote=lambda _: hosted)
    monkeypatch.setattr(run_stage, "ray", fake)
    with RunLock(tmp_path):
        start_controller(sft_config(tmp_path), Startup(0.0))
        monkeypatch.setattr(run_lock, "_tokens", {})  # as in another process
        actor.Controller(*created[0])
        require_lock(tmp_path)
        take_over(tmp_path)
        with expect_error(LostLockError, "123", "n2"):
            require_lock(tmp_path)


def test_a_new_run_renames_the_artifacts_of_earlier_ones(tmp_path):
    for number in range(3):
        with ExitStack() as closing:
            assert begin_run(sft_config(tmp_path), "sft", None, closing) is None
        (tmp_path / "metrics.jsonl").write_text(f"{number}")
    written = {path.name: path.read_text() for path in tmp_path.glob("metrics*")}
    assert written == {"metrics.jsonl": "2", "metrics.jsonl.1": "0", "metrics.jsonl.2": "1"}
    assert (tmp_path / "sft.yaml").exists()


def test_stop_lets_the_thread_of_the_stage_close_what_it_uses(monkeypatch):
    closed_by: list[threading.Thread] = []
    errors: list[MegarlError] = []
    kinds: list[Any] = []
    is_running = threading.Event()

    def wait_for_engines(config, closing):
        closing.push(lambda kind, *_: kinds.append(kind))
        closing.callback(lambda: closed_by.append(threading.current_thread()))
        is_running.set()
        ends = time.monotonic() + HANG_SECONDS
        while time.monotonic() < ends:
            assert not closed_by, "closed while the stage uses it"
            run_abort_check(lambda: ["engine 0"])
            time.sleep(0.01)
        raise AssertionError("the stage was not interrupted")

    def evaluate():
        try:
            controller.evaluate(run_config({"type": "grpo"}))
        except MegarlError as error:
            errors.append(error)

    monkeypatch.setattr("megarl.run.remote.build.build_evaluation", wait_for_engines)
    controller = Controller(Startup(0.0), 0.0)
    stage = threading.Thread(target=evaluate)
    stage.start()
    assert is_running.wait(HANG_SECONDS)
    controller.stop()
    assert closed_by == [stage]
    assert kinds == [KeyboardInterrupt], "the last heartbeat must not report a completed run"
    stage.join(HANG_SECONDS)
    assert [str(error) for error in errors] == ["the run was interrupted"]


def test_stop_of_an_idle_controller_returns():
    Controller(Startup(0.0), 0.0).stop()


def test_the_lock_of_a_controller_on_a_lost_node_is_acquired_once_it_expires(tmp_path, monkeypatch):
    with RunLock(tmp_path):
        content = json.loads((tmp_path / "lock").read_bytes())
    (tmp_path / "lock").write_text(json.dumps(content | {"host": "n2", "machine": "another boot"}))
    os.utime(tmp_path / "lock", (time.time() - LOCK_TIMEOUT_SECONDS + 1,) * 2)
    monkeypatch.setattr(ray_session, "START_TIMEOUT_SECONDS", 0.0)
    lock = RunLock(tmp_path)
    with acquire_when_free(lock):
        assert lock.is_held()


def test_only_what_is_written_to_stderr_within_the_block_is_discarded(capfd):
    sys.stderr.write("before\n")
    with discarded_native_stderr():
        os.write(2, b"from native code\n")
    sys.stderr.write("after\n")
    os.write(2, b"and later\n")
    assert capfd.readouterr().err == "before\nafter\nand later\n"


def test_share_of_training_counts_all_phases_of_models():
    seconds = {"total": 20.0, "train": 12.0, "train_critic": 4.0, "values": 2.5, "rollout": 0.5, "estimate": 0.25}
    report = ReplayReport(begun_at=4, last_step=12, checkpoints={}, seconds=seconds)
    assert report.training_share == pytest.approx(18.5 / 20)
    assert report.line == "replayed steps 5 to 12 in 20.0 s, 92.5% of it training"


WORLD = TorchrunWorld(rank=0, size=8, local_rank=0, local_size=4)


@pytest.mark.parametrize(
    ("device", "gpus", "chosen"),
    [("auto", 0, "cpu"), ("auto", 3, "cpu"), ("auto", 4, "cuda"), ("cpu", 4, "cpu"), ("cuda", 5, "cuda")],
)
def test_ranks_use_gpus_if_there_is_one_for_each(device, gpus, chosen, monkeypatch):
    monkeypatch.setattr(spmd_stage, "visible_gpu_names", lambda: ["a GPU"] * gpus)
    assert spmd_stage.choose_device(PlacementConfig(device=device), WORLD) == chosen


def test_requested_gpus_must_exist(monkeypatch):
    monkeypatch.setattr(spmd_stage, "visible_gpu_names", lambda: ["a GPU"] * 3)
    with expect_error(ConfigError, "placement.device", "GPU", "torchrun's 4", "3"):
        spmd_stage.choose_device(PlacementConfig(device="cuda"), WORLD)
