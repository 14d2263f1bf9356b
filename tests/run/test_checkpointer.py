"""When checkpoints are begun, completed and given up; ranks are stood in for by files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.checkpoint.manifest import read_manifest
from megarl.checkpoint.store import CheckpointStore
from megarl.checkpoint.verify import hash_file
from megarl.config import RunConfig
from megarl.errors import DataError
from megarl.megatron.requests import SavedFile, SavedPart, SaveOrder, SaveStats
from megarl.rollout.journal.journal_folder import journal_folder, step_folder, steps_in
from megarl.run.checkpointer import Checkpointer
from megarl.run.run_state import RunState
from tests.run.finished_groups import run_config


@dataclass
class Ranks:
    """A trained model whose state is a text."""

    content: str = "weights"
    written: bool = True
    busy: int = 0
    """So often it is to be looked at before it has written."""
    fails: str = ""
    """At `begin` or `finish`."""
    orders: list[SaveOrder] = field(default_factory=list)

    def begin_save(self, order: SaveOrder) -> SaveStats:
        if self.fails == "begin":
            raise DataError("no space left on device")
        self.orders.append(order)
        folder = Path(order.folder)
        folder.mkdir()
        (folder / "0.distcp").write_text(self.content)
        return SaveStats(staging_bytes=len(self.content), bytes=len(self.content), seconds=0.0)

    def save_is_written(self) -> bool:
        self.busy -= 1
        return self.written and self.busy < 0

    def finish_save(self) -> SavedPart:
        assert self.busy < 0, "ranks that are done would wait in a collective"
        if self.fails == "finish":
            raise DataError("rank 1 could not write: no space left on device")
        content = self.content.encode()
        file = SavedFile(name="0.distcp", bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        return SavedPart(files=(file,), write_seconds=0.0)

    def save_hf(self, folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "model.safetensors").write_text(self.content)


@dataclass
class World:
    config: RunConfig
    models: dict[str, Any]
    checkpoints: Checkpointer
    said: list[str]
    saved: list[int]

    @property
    def steps(self) -> list[int]:
        return [each.step for each in CheckpointStore(self.config.run_dir).saved()]

    def step(self, number: int) -> None:
        """As a run does."""
        self.checkpoints.poll()
        if self.checkpoints.is_due(number):
            self.checkpoints.begin(number)
        self.checkpoints.add_state(lambda: RunState(step=number))


def world(tmp_path: Path, **options: Any) -> World:
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
    said: list[str] = []
    saved: list[int] = []
    models: dict[str, Any] = {"policy": Ranks(), "critic": Ranks("values")}
    return World(config, models, Checkpointer(config, models, said.append, saved=saved.append), said, saved)


def test_a_checkpoint_is_whole_once_all_ranks_have_written(tmp_path: Path) -> None:
    here = world(tmp_path, hf=True)
    here.models["critic"].written = False
    here.step(1)
    here.step(2)
    here.step(3)
    assert here.steps == []
    here.models["critic"].written = True
    here.step(4)
    assert here.steps == [2]
    here.checkpoints.finish()
    assert here.steps == here.saved == [2, 4]
    folder = CheckpointStore(here.config.run_dir).saved()[-1].folder
    assert RunState.read(folder).step == 4
    assert CheckpointStore(here.config.run_dir).verify(folder) == []
    assert read_manifest(folder).data == hash_file(tmp_path / "data.jsonl")
    files = {"config.yaml", "critic/0.distcp", "hf/model.safetensors", "policy/0.distcp", "state.json"}
    assert set(read_manifest(folder).files) == files
    assert [order.asynchronous for order in here.models["policy"].orders] == [True, True]


def test_ranks_that_still_write_are_waited_for_outside_their_collectives(tmp_path: Path) -> None:
    here = world(tmp_path)
    here.models["critic"].busy = 3
    here.step(2)
    here.checkpoints.finish()
    assert here.steps == [2]


def test_synchronous_ones_are_whole_when_the_step_is(tmp_path: Path) -> None:
    here = world(tmp_path, asynchronous=False)
    here.step(2)
    assert here.steps == [2]
    assert not here.models["policy"].orders[0].asynchronous


def test_old_ones_go_and_with_them_their_journal(tmp_path: Path) -> None:
    here = world(tmp_path, keep_last=2, keep_every=6)
    for number in range(1, 11):
        step_folder(journal_folder(here.config.run_dir), number).mkdir(parents=True)
        here.step(number)
    here.checkpoints.finish()
    assert here.steps == [6, 8, 10]
    assert steps_in(here.config.run_dir) == [9, 10]


@pytest.mark.parametrize("at", ["begin", "finish"])
def test_one_that_cannot_be_written_is_told_and_the_next_is_made(at: str, tmp_path: Path) -> None:
    here = world(tmp_path)
    here.step(2)
    here.models["critic"].fails = at
    here.step(3)
    here.step(4)
    here.checkpoints.finish()
    here.models["critic"].fails = ""
    here.step(6)
    here.checkpoints.finish()
    kept = [2, 6] if at == "begin" else [6]  # the first one was completed with the ranks that failed
    assert here.steps == kept
    assert any("no checkpoint" in text and "no space left on device" in text for text in here.said)
    assert [p.name for p in CheckpointStore(here.config.run_dir).folder.iterdir() if p.name.startswith(".")] == []


def test_a_disk_without_room_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    here.step(2)
    assert here.models["policy"].orders == []
    assert len(here.said) == 1
    assert "GiB for the checkpoint of step 2, has 0.00 GiB free" in here.said[0]


def test_one_under_way_is_given_up_with_its_run(tmp_path: Path) -> None:
    here = world(tmp_path)
    here.models["policy"].written = False
    here.step(2)
    here.checkpoints.discard()
    here.checkpoints.finish()
    assert here.steps == []


def test_a_disk_that_is_full_at_the_end_costs_the_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(tmp_path)

    def refuse(self: RunState, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunState, "write", refuse)
        here.step(2)
        here.checkpoints.finish()
    assert "cannot be written: No space left on device" in here.said[0]
    here.step(4)
    here.checkpoints.finish()
    assert here.steps == [4]


def test_what_cannot_be_removed_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(tmp_path, keep_last=1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("megarl.run.checkpointer.drop_steps", refuse)
    for number in range(1, 5):
        here.step(number)
    here.checkpoints.finish()
    assert here.steps == [4]
    assert here.saved == [2, 4]
    assert here.checkpoints.last_step == 4
    assert not any("no checkpoint" in text for text in here.said)
    assert here.said[-1] == "step 4: what is not needed any more could not be removed: [Errno 5] Input/output error"


def test_the_one_just_written_stays_whatever_later_ones_are_there(tmp_path: Path) -> None:
    here = world(tmp_path, keep_last=2)
    for number in range(1, 9):
        here.step(number)
    here.checkpoints.finish()
    assert here.steps == [6, 8]
    # as after going on from an earlier step, these being damaged in a way that sizes do not show
    for number in (1, 2, 4):
        here.step(number)
    here.checkpoints.finish()
    assert here.steps == [2, 4, 6, 8]


def test_the_model_s_folder_may_be_gone(tmp_path: Path) -> None:
    here = world(tmp_path)
    (tmp_path / "model").rename(tmp_path / "moved")
    here.step(2)
    here.checkpoints.finish()
    assert here.steps == [2]
