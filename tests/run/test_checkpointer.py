"""When checkpoints are started, completed and discarded, with fake trainers that write small files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.checkpoint.manifest import read_manifest
from megarl.checkpoint.run_lock import RunLock
from megarl.checkpoint.store import CheckpointStore
from megarl.checkpoint.verify import hash_file
from megarl.config import RunConfig
from megarl.errors import DataError, LostLockError
from megarl.megatron.requests import SavedFile, SavedShard, SaveRequest, SaveStats
from megarl.rollout.journal.journal_folder import journal_folder, list_steps, step_folder
from megarl.run.checkpointer import Checkpointer
from megarl.run.run_state import RunState
from megarl.run.schedule_log import log_folder
from megarl.schedule.events import OpenGroup, ScheduleState
from tests.checkpoint.run_folder import take_over
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
    config = run_config(
        {"type": "grpo"},
        run_dir=str(tmp_path / "run"),
        model={"path": str(tmp_path / "model")},
        data={"path": str(tmp_path / "data.jsonl")},
        checkpoint={"every": 2, **options},
    )
    messages: list[str] = []
    saved: list[int] = []
    models: dict[str, Any] = {"policy": FakeTrainer(), "critic": FakeTrainer("values")}
    return CheckpointedRun(
        config, models, Checkpointer(config, models, messages.append, on_saved=saved.append), messages, saved
    )


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
        run.schedules[number] = ScheduleState(
            version=number, next_ordinal=32 * (number + 1), num_events=10 * number + 9, groups=(group,)
        )
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
    assert len(run.messages) == 1
    assert "GiB for the checkpoint of step 2, has 0.00 GiB free" in run.messages[0]


def test_discard_drops_the_checkpoint_in_progress(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.models["policy"].written = False
    run.step(2)
    run.checkpoints.discard()
    run.checkpoints.finish()
    assert run.steps == []


def test_a_disk_that_is_full_at_commit_fails_only_that_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)

    def refuse(self: RunState, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunState, "write", refuse)
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
        with pytest.raises(LostLockError, match=f"{run_dir}.*pid 123 on host n2"):
            run.checkpoints.finish()
    assert run.steps == run.saved == []


def test_failing_to_remove_old_files_does_not_fail_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, keep_last=1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("megarl.run.checkpointer.remove_steps", refuse)
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
