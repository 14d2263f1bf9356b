"""Checkpoints of a run, with fake trainers that write small files, and the run that resumes from one.

A resumed run makes the calls and logs the metrics of an uninterrupted one; one that lost its folder logs nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.checkpoint.manifest import hash_file, read_manifest
from megarl.checkpoint.run_lock import RunLock
from megarl.checkpoint.store import CheckpointStore
from megarl.config import RunConfig, SftConfig
from megarl.config.load import make_config
from megarl.data.sampler import PromptOrder, SamplerState
from megarl.errors import DataError, LostLockError
from megarl.megatron.requests import SavedFile, SavedShard, SaveRequest, SaveStats, TrainRequest
from megarl.rollout.journal import journal_folder, list_steps, step_folder
from megarl.run.checkpointer import Checkpointer
from megarl.run.run_logs import log_folder
from megarl.run.run_state import RunState, RunTotals
from megarl.run.schedule.events import OpenGroup, ScheduleState
from megarl.run.stage_run import StageRun
from megarl.run.step_limits import MismatchHistory
from megarl.tracking.progress import EventLog
from megarl.tracking.timing import PhaseTimer
from tests.algorithms.scripted_run import FinishedRun, run_script
from tests.algorithms.test_training_loops import SAFE_TERMS
from tests.checkpoint.run_folder import take_over
from tests.config.runs import REQUIRED
from tests.errors import expect_error
from tests.run.finished_groups import run_config


@dataclass
class FakeTrainer:
    """A trained model whose state is a string."""

    content: str = "weights"
    written: bool = True
    is_late: bool = False
    """Whether a save is written only once it is waited for."""
    calls: list[str] = field(default_factory=list)
    """Calls after `begin_save`."""
    fails_at: str = ""
    """Fail at `begin` or `finish`; empty: never."""
    orders: list[SaveRequest] = field(default_factory=list)

    def begin_save(self, order: SaveRequest) -> SaveStats:
        if self.fails_at == "begin":
            raise DataError("no space left on device")
        self.orders.append(order)
        folder = Path(order.folder)
        folder.mkdir()
        (folder / "0.distcp").write_text(self.content)
        return SaveStats(staging_bytes=len(self.content), bytes=len(self.content), seconds=0.0)

    def is_save_written(self) -> bool:
        self.calls.append("is_save_written")
        return self.written and not self.is_late

    def wait_save_written(self) -> None:
        self.calls.append("wait_save_written")
        self.is_late = False

    def finish_save(self) -> SavedShard:
        assert not self.is_late, "ranks that are done would wait in a collective"
        self.calls.append("finish_save")
        if self.fails_at == "finish":
            raise DataError("rank 1 could not write: no space left on device")
        content = self.content.encode()
        file = SavedFile(name="0.distcp", bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        return SavedShard(files=(file,), write_seconds=0.0)

    def save_hf(self, folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "model.safetensors").write_text(self.content)


@dataclass
class CheckpointedRun:
    config: RunConfig
    models: dict[str, Any]
    checkpoints: Checkpointer
    messages: list[str]
    saved: list[int]
    schedules: dict[int, ScheduleState] = field(default_factory=dict)
    """By step, what the run state has of a schedule."""

    @property
    def steps(self) -> list[int]:
        return [each.step for each in CheckpointStore(self.config.run_dir).entries()]

    def step(self, number: int) -> None:
        """Make the calls of one step, as a run does."""
        self.checkpoints.poll()
        if self.checkpoints.is_due(number):
            self.checkpoints.begin(number)
        self.checkpoints.add_state(lambda: RunState(step=number, schedule=self.schedules.get(number)))

    def finish_steps(self, *numbers: int) -> None:
        """Make the calls of these steps, and of the end of a run; each step has a folder in the journal."""
        for number in numbers:
            step_folder(journal_folder(self.config.run_dir), number).mkdir(parents=True, exist_ok=True)
            self.step(number)
        self.checkpoints.finish()


def make_run(tmp_path: Path, **options: Any) -> CheckpointedRun:
    (tmp_path / "model").mkdir()
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1"}\n')
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["Tiny"], "hidden_size": 8}))
    paths = {"model": {"path": str(tmp_path / "model")}, "data": {"path": str(tmp_path / "data.jsonl")}}
    config = run_config({}, run_dir=str(tmp_path / "run"), checkpoint={"every": 2, **options}, **paths)
    messages, saved = list[str](), list[int]()
    models: dict[str, Any] = {"policy": FakeTrainer(), "critic": FakeTrainer("values")}
    checkpoints = Checkpointer(config, models, messages.append, on_saved=saved.append)
    return CheckpointedRun(config, models, checkpoints, messages, saved)


def test_a_checkpoint_is_committed_once_all_ranks_have_written(tmp_path: Path) -> None:
    run = make_run(tmp_path, hf=True)
    run.models["critic"].written = False
    for number in (1, 2, 3):
        run.step(number)
    assert run.steps == []
    run.models["critic"].written = True
    run.step(4)
    assert run.steps == [2]
    run.checkpoints.finish()
    assert run.steps == run.saved == [2, 4]
    folder = CheckpointStore(run.config.run_dir).entries()[-1].folder
    assert RunState.read(folder).step == 4
    assert CheckpointStore(run.config.run_dir).verify(folder) == []
    assert read_manifest(folder).data == {"data.path": hash_file(tmp_path / "data.jsonl")}
    files = {"config.yaml", "critic/0.distcp", "hf/model.safetensors", "policy/0.distcp", "state.json"}
    assert set(read_manifest(folder).files) == files
    assert [order.asynchronous for order in run.models["policy"].orders] == [True, True]


def test_finish_waits_for_ranks_outside_their_collectives_without_polling(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.models["critic"].is_late = True
    run.finish_steps(2)
    assert [model.calls for model in run.models.values()] == [["wait_save_written", "finish_save"]] * 2
    assert run.steps == [2]


def test_a_synchronous_checkpoint_is_committed_within_its_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, asynchronous=False)
    run.step(2)
    assert run.steps == [2]
    assert not run.models["policy"].orders[0].asynchronous


@pytest.mark.parametrize(
    ("options", "kept", "journal"),
    [({"keep_every": 6}, [6, 8, 10], [9, 10]), ({"keep_journal": "all"}, [8, 10], list(range(1, 11)))],
    ids=str,
)
def test_old_checkpoints_and_their_journal_are_removed(
    options: dict[str, Any], kept: list[int], journal: list[int], tmp_path: Path
) -> None:
    run = make_run(tmp_path, keep_last=2, **options)
    run.finish_steps(*range(1, 11))
    assert run.steps == kept
    assert list_steps(run.config.run_dir) == journal


def test_the_journal_and_log_of_open_groups_are_kept(tmp_path: Path) -> None:
    """Checkpoints have an open group of step 3, of 32 a step; the log of step N has the events from 10 N on."""
    run = make_run(tmp_path, keep_last=1)
    log = log_folder(journal_folder(run.config.run_dir))
    log.mkdir(parents=True)
    group = OpenGroup(ordinal=2 * 32 + 5, version=1)
    for number in range(1, 7):
        (log / f"{10 * number:012d}.jsonl").touch()
        state = ScheduleState(version=number, next_ordinal=32 * (number + 1), groups=(group,))
        run.schedules[number] = replace(state, num_events=10 * number + 9)
    run.finish_steps(*range(1, 7))
    assert run.steps == [6]
    assert list_steps(run.config.run_dir) == [3, 4, 5, 6]
    assert [path.name for path in log.iterdir()] == ["000000000060.jsonl"]  # its events may be needed: it is the last


@pytest.mark.parametrize("at", ["begin", "finish"])
def test_a_failed_checkpoint_is_reported_and_the_next_one_is_made(at: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.step(2)
    run.models["critic"].fails_at = at
    run.finish_steps(3, 4)
    run.models["critic"].fails_at = ""
    run.finish_steps(6)
    kept = [2, 6] if at == "begin" else [6]  # `finish` fails while the first one is completed
    assert run.steps == kept
    assert any("checkpoint failed" in text and "no space left on device" in text for text in run.messages)
    assert [p.name for p in CheckpointStore(run.config.run_dir).folder.iterdir() if p.name.startswith(".")] == []


def test_a_full_disk_is_detected_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    run.step(2)
    assert run.models["policy"].orders == []
    (message,) = run.messages
    assert "GiB for the checkpoint of step 2, has 0.00 GiB free" in message


def test_discard_drops_the_checkpoint_in_progress(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.models["policy"].written = False
    run.step(2)
    run.checkpoints.discard()
    run.checkpoints.finish()
    assert run.steps == []


def raising(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


def test_a_disk_that_is_full_at_commit_fails_that_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(RunState, "write", raising(OSError(28, "No space left on device")))
        run.finish_steps(2)
    assert "cannot be written: No space left on device" in run.messages[0]
    run.finish_steps(4)
    assert run.steps == [4]


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_run_that_lost_its_folder_ends_at_the_next_checkpoint(is_removed: bool, tmp_path: Path) -> None:
    """`is_removed`: the new owner has already removed the unfinished checkpoint, so that its commit fails."""
    run = make_run(tmp_path)
    run_dir = Path(run.config.run_dir)
    with RunLock(run_dir):
        run.step(2)
        take_over(run_dir)
        if is_removed:
            CheckpointStore(run_dir).remove_partial()
        with expect_error(LostLockError, str(run_dir), "pid 123 on host n2"):
            run.checkpoints.finish()
    assert run.steps == run.saved == []


def test_failing_to_remove_old_files_fails_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, keep_last=1)
    monkeypatch.setattr("megarl.run.checkpointer.remove_steps", raising(OSError(5, "Input/output error")))
    run.finish_steps(*range(1, 5))
    assert (run.steps, run.saved, run.checkpoints.last_step) == ([4], [2, 4], 4)
    assert not any("checkpoint failed" in text for text in run.messages)
    assert run.messages[-1] == "step 4: cannot remove old checkpoints or their journal: [Errno 5] Input/output error"


def test_pruning_keeps_the_newest_written_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, keep_last=2)
    run.finish_steps(*range(1, 9))
    assert run.steps == [6, 8]
    # as after resuming from an earlier step because the later ones are damaged (sizes unchanged)
    run.finish_steps(1, 2, 4)
    assert run.steps == [2, 4, 6, 8]


def test_the_model_folder_may_be_deleted_during_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / "model").rename(tmp_path / "moved")
    run.finish_steps(2)
    assert run.steps == [2]


STEPS, SAVED = 10, 8

CRITIC = {"pretraining": {"max_steps": 3}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_loss": None, "kl_reward": {"kind": "k3", "coefficient": 0.1, "target": 0.3, "horizon": 20}},
    "dapo": {"max_batches": 3},
    "remax": {},
    "ppo": {},
    "pf_ppo": {},
    "vapo": CRITIC,
    "safe_rlhf": {"multiplier_lr": 0.05},
    "prime": {},
}


def differing_reward(label: str, prompt: int, sample: int) -> float:
    """Reward that differs between samples; constant for odd prompts of labels that end in "-1"."""
    if prompt % 2 == 1 and label.endswith("-1"):
        return 1.0
    return math.sin(len(label) * 7 + sum(map(ord, label)) + prompt * 3 + sample)


def train(folder: Path, name: str, *, stops_after: int | None = None, resumed: RunState | None = None) -> FinishedRun:
    events = EventLog()

    def script(label: str, prompt: int, sample: int) -> float:
        if stops_after is not None and label.startswith(f"step-{stops_after}"):
            events.request_stop()
        return differing_reward(label, prompt, sample)

    def mismatch(request: TrainRequest) -> dict[str, float]:
        step = int(Path(request.guard.dump_folder or "").name.removeprefix("step-"))
        return {"train_infer_mismatch/kl": 2e-9 * step**3}

    sections: dict[str, Any] = SAFE_TERMS if name == "safe_rlhf" else {}
    models: dict[str, Any] = {"policy": {"metrics": mismatch}, "reward cost": {"score": lambda key: 1.0 + key[1]}}
    algorithm = {"type": name, **ALGORITHMS[name]}
    return run_script(folder, algorithm, script, steps=STEPS, events=events, resumed=resumed, models=models, **sections)


def calls_after(run: FinishedRun, after: int) -> list[tuple[str, str, str]]:
    """Return all calls of the steps after `after`, in order."""
    labels = [call.argument.label.split("-greedy")[0] if call.method == "sample" else "" for call in run.log]
    first = labels.index(f"step-{after + 1}")
    folder = run.run.config.run_dir
    return [(a.target, a.method, repr(a.argument).replace(folder, "")) for a in run.log[first:]]


def metrics_after(run: FinishedRun, after: int) -> list[dict[str, float]]:
    """Return the metrics of the steps after `after`, without measured times and sizes."""
    measured = ("time/", "tokens_per_second", "controller/", "rollout/")
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in run.metrics if row["step"] > after]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resumed_run_makes_the_same_calls_and_metrics(name: str, tmp_path: Path) -> None:
    full = train(tmp_path / "full", name)
    stopped = train(tmp_path / "parts", name, stops_after=SAVED)
    assert stopped.run.step == SAVED
    stopped.run.state().write(tmp_path)
    resumed_run = train(tmp_path / "parts", name, resumed=RunState.read(tmp_path))
    assert [row["step"] for row in resumed_run.metrics] == list(range(1, STEPS + 1))
    assert len(metrics_after(full, SAVED)) == STEPS - SAVED
    assert metrics_after(resumed_run, SAVED) == metrics_after(full, SAVED)
    assert calls_after(resumed_run, SAVED) == calls_after(full, SAVED)
    if name != "prime":  # which trains in fewer steps
        first = resumed_run.arguments("policy", "train")[0]
        assert first.guard.mismatch["logprob_kl"].max == pytest.approx(4 * 2e-9 * SAVED**3)
    assert resumed_run.run.state().mismatch == full.run.state().mismatch
    assert resumed_run.pushed_versions[0] == stopped.pushed_versions[-1] == SAVED
    assert resumed_run.run.state().totals.tokens == full.run.state().totals.tokens
    assert resumed_run.run.state().algorithm_state == full.run.state().algorithm_state


def test_metrics_after_the_saved_step_are_discarded(tmp_path: Path) -> None:
    stopped = train(tmp_path / "run", "grpo", stops_after=SAVED)
    state = stopped.run.state()
    train(tmp_path / "run", "grpo", resumed=state)
    train(tmp_path / "run", "grpo", resumed=state)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


def test_state_round_trips_exactly(tmp_path: Path) -> None:
    state = RunState(
        step=7,
        policy_version=6,
        samplers={"prompts": SamplerState(epoch=1, position=3, seed=2**40)},
        algorithm_state={"kl": {"coefficient": 0.1 + 0.2}, "odd": {"value": math.inf}},
        mismatch={"logprob_kl": MismatchHistory(dtype="bfloat16", passed=(1 / 3, 1e-300))},
        metrics_bytes=2**40,
        totals=RunTotals(evaluations={0: 1 / 3}, seconds_by_phase={"train": 1e-300}, logprob_abs_max=math.inf),
    )
    state.write(tmp_path)
    assert RunState.read(tmp_path) == state


def test_an_unreadable_state_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with expect_error(DataError, f"{path} ", "No such file"):
        RunState.read(tmp_path)
    path.write_text('{"step": "many"}')
    with expect_error(DataError, f"{path}: step: ", "integer"):
        RunState.read(tmp_path)


def make_stage_run(run_dir: Path, resumed: RunState | None = None) -> StageRun:
    config = make_config(SftConfig, REQUIRED | {"run_dir": str(run_dir)})
    return StageRun(config, EventLog(), PhaseTimer(), order=PromptOrder(8, 0, shuffle=False), resumed=resumed)


def test_a_run_that_lost_its_folder_neither_logs_metrics_nor_truncates_them_when_it_recovers(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        run = make_stage_run(tmp_path)
        run.log({"loss": 1.0})
        written = (tmp_path / "metrics.jsonl").read_text()
        take_over(tmp_path)
        with expect_error(LostLockError, f"run_dir {tmp_path} ", "pid 123 on host n2"):
            run.log({"loss": 2.0})
        with pytest.raises(LostLockError):
            make_stage_run(tmp_path, RunState())
        assert (tmp_path / "metrics.jsonl").read_text() == written
