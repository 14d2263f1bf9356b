"""Which checkpoint `--resume` chooses, what it refuses, and that it changes nothing."""

import json
import struct
import zlib
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.manifest import CheckpointMetadata, Manifest, hash_file
from megarl.checkpoint.store import CheckpointStore
from megarl.config import RunConfig, SftConfig, StageConfig, dump_config
from megarl.controller.resume import ResumePlan, latest_valid, plan_resume
from megarl.controller.run_stage import RUN_ARTIFACTS
from megarl.errors import ConfigError, DataError, MegarlError
from megarl.run.run_state import RunState
from tests.checkpoint.run_folder import write_format_1_manifest
from tests.run.finished_groups import run_config


def make_config(folder: Path, name: str = "run", **sections: Any) -> RunConfig:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    if not (model / "config.json").exists():
        (model / "config.json").write_text(json.dumps({"architectures": ["Tiny"], "hidden_size": 8}))
    return run_config({"type": "grpo"}, run_dir=str(folder / name), model={"path": str(model)}, **sections)


def save(config: RunConfig, *steps: int) -> RunConfig:
    for step in steps:
        draft = CheckpointStore(config.run_dir).begin(step)
        (draft.folder / "policy").mkdir()
        (draft.folder / "policy" / "0.distcp").write_text("weights")
        (draft.folder / "config.yaml").write_text(dump_config(config))
        RunState(step=step).write(draft.folder)
        draft.commit(CheckpointMetadata.from_config(config), {})
    return config


def find(config: StageConfig, which: str) -> tuple[ResumePlan, list[str]]:
    messages: list[str] = []
    return plan_resume(config, which, RUN_ARTIFACTS, messages.append), messages


def list_paths(config: StageConfig) -> list[str]:
    return sorted(str(path.relative_to(config.run_dir)) for path in Path(config.run_dir).rglob("*"))


def assert_refused(config: StageConfig, which: str, *texts: str, kind: type[MegarlError] = DataError) -> None:
    """Check that the checkpoint is refused with these texts, and that the folder of the run is as before."""
    before = list_paths(config)
    with pytest.raises(kind) as error:
        find(config, which)
    for text in texts:
        assert text in str(error.value)
    assert list_paths(config) == before


def checkpoint_folder(config: StageConfig, step: int) -> Path:
    return CheckpointStore(config.run_dir).folder / f"step-{step:06d}"


def damage(config: StageConfig, step: int, content: str = "weighty") -> None:
    """Replace the content of a file, `weights`; by default by one of the same size."""
    (checkpoint_folder(config, step) / "policy" / "0.distcp").write_text(content)


def test_auto_is_the_newest_valid_checkpoint(tmp_path):
    config = save(make_config(tmp_path), 2, 4, 6)
    damage(config, 6, "wei")
    before = list_paths(config)
    start, messages = find(config, "auto")
    assert start == ResumePlan(checkpoint=checkpoint_folder(config, 4))
    assert messages == [
        "checkpoint step-000006 is damaged: policy/0.distcp has 3 bytes, needs 7; step-000004 is used instead"
    ]
    assert list_paths(config) == before


def test_a_file_with_other_content_is_detected(tmp_path):
    config = save(make_config(tmp_path), 2, 4)
    damage(config, 4)
    damaged = "step-000004 is damaged: policy/0.distcp has sha256"
    start, messages = find(config, "auto")
    assert start.checkpoint == checkpoint_folder(config, 2)
    assert damaged in messages[0]
    assert_refused(config, "4", damaged)
    for which in ("auto", "4"):
        start, _ = find(make_config(tmp_path, checkpoint={"verify": "sizes"}), which)
        assert start.checkpoint == checkpoint_folder(config, 4)
    damage(config, 2)
    all_damaged = "/checkpoints has no valid checkpoint, all 2 are damaged: "
    assert_refused(config, "auto", all_damaged)
    with pytest.raises(DataError, match=all_damaged):
        latest_valid(config, str)  # called by a run that has lost its trainer


def test_without_a_checkpoint_a_run_starts_from_step_0_and_keeps_its_journal(tmp_path):
    start, messages = find(make_config(tmp_path), "auto")
    assert start.checkpoint is None
    assert {path.name for path in start.to_rotate} == set(RUN_ARTIFACTS) - {"journal"}
    assert messages[0].endswith("has no checkpoint to resume from: the run starts from step 0")


def test_resuming_from_an_earlier_step_rotates_later_checkpoints(tmp_path):
    config = save(make_config(tmp_path), 2, 4, 6)
    first, *later = (checkpoint_folder(config, step) for step in (2, 4, 6))
    assert find(config, "2")[0] == ResumePlan(checkpoint=first, to_rotate=tuple(later))


def test_a_checkpoint_of_another_run_starts_a_new_run(tmp_path):
    other = make_config(tmp_path, "other")
    save(other, 2)
    start, messages = find(make_config(tmp_path, trainer={"steps": 7}), str(checkpoint_folder(other, 2)))
    assert start.checkpoint == checkpoint_folder(other, 2)
    assert {path.name for path in start.to_rotate} == set(RUN_ARTIFACTS)
    assert "trainer.steps was 100 in step-000002, is 7" in messages


@pytest.mark.parametrize("which", ["auto", "2"])
def test_incompatible_settings_are_refused_with_every_difference(which, tmp_path):
    agent = {"path": "my_agents:run", "kwargs": {"turns": 2}}
    save(make_config(tmp_path, rollout={"agent": agent}), 2)
    changed: dict[str, Any] = {
        "seed": 1,
        "trainer": {"optimizer": {"lr": 0.5}, "steps": 7},
        "rollout": {"agent": agent | {"kwargs": {"turns": 3}}, "sampling": {"temperature": 0.5}},
    }
    differences = (
        "seed",
        "trainer.optimizer.lr",
        "trainer.steps",
        "rollout.agent.kwargs.turns: 2 was saved, got 3 (contradicts)",
        "rollout.sampling.temperature: 1.0 was saved, got 0.5 (contradicts)",
    )
    assert_refused(make_config(tmp_path, **changed), which, *differences, kind=ConfigError)


@pytest.mark.parametrize("which", ["auto", "2"])
def test_a_checkpoint_of_another_model_or_command_is_refused(which, tmp_path):
    saved = make_config(tmp_path)
    save(saved, 2)
    tree = {"run_dir": saved.run_dir, "model": saved.model.model_dump(), "data": {"path": "d"}}
    message = f"--resume: checkpoint {checkpoint_folder(saved, 2)} was written by megarl train, and megarl sft cannot"
    assert_refused(SftConfig.model_validate(tree), which, message, kind=ConfigError)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["Tiny"], "hidden_size": 16}))
    message = "checkpoint step-000002 belongs to another model: needs hidden_size 8, got 16"
    assert_refused(make_config(tmp_path), which, message)


@pytest.mark.parametrize("which", ["3", "nowhere"])
def test_a_missing_checkpoint_is_reported_with_the_existing_ones(which, tmp_path):
    config = save(make_config(tmp_path), 2)
    assert_refused(config, which, "there is no ", " has checkpoints of steps 2")


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    monkeypatch.setattr(Manifest, "__init__", partialmethod(Manifest.__init__, format_version=3))
    save(config, 2)
    monkeypatch.undo()
    assert_refused(config, "auto", "has format 3, but this version of megarl reads format 2: use the newer version ")


@pytest.mark.parametrize("which", ["auto", "4", "step-000004", "path"])
def test_an_older_format_is_refused_and_the_run_does_not_start_over(which, tmp_path):
    config = save(make_config(tmp_path), 2, 4)
    folder = checkpoint_folder(config, 4)
    for step in (2, 4):
        write_format_1_manifest(checkpoint_folder(config, step), step)
    message = (
        f"checkpoint {folder} has format 1, but this version of megarl reads format 2: start a new run, or resume "
    )
    assert_refused(config, str(folder) if which == "path" else which, message)
    with pytest.raises(DataError, match=message):
        latest_valid(config, str)  # called by a run that has lost its trainer


def test_trainer_steps_below_the_checkpoint_step_is_refused(tmp_path):
    save(make_config(tmp_path), 2, 4)
    config = make_config(tmp_path, trainer={"steps": 3})
    message = "trainer.steps needs to be at least 4, the step of step-000004, got 3"
    assert_refused(config, "auto", message, kind=ConfigError)
    assert find(config, "2")[0].checkpoint is not None
    assert find(make_config(tmp_path, trainer={"steps": 4}), "auto")[0].checkpoint is not None


def test_a_journal_with_a_missing_step_is_rotated(tmp_path):
    config = save(make_config(tmp_path), 2, 4)
    journal = Path(config.run_dir) / "journal"
    for step in (5, 6, 7):
        (journal / f"step-{step:06d}").mkdir(parents=True)
    assert find(config, "auto") == (ResumePlan(checkpoint=checkpoint_folder(config, 4)), [])
    start, messages = find(config, "2")
    assert journal in start.to_rotate
    assert messages == [f"{journal} has step 7 but not step 3 and is renamed"]
    (journal / "step-000006").rmdir()
    assert journal in find(config, "auto")[0].to_rotate


@pytest.mark.parametrize("steps", [(), (2, 4)])
def test_a_journal_of_the_previous_format_is_refused(tmp_path, steps):
    """The first record of a format-1 file has a fingerprint but no format number."""
    config = save(make_config(tmp_path), *steps)
    journal = Path(config.run_dir) / "journal"
    (journal / "step-000005").mkdir(parents=True)
    meta = b'{"fingerprint": "0123456789abcdef"}'
    head = struct.pack("<4sIIII", b"mgrj", len(meta), 0, zlib.crc32(meta), zlib.crc32(b""))
    record = head + struct.pack("<I", zlib.crc32(head)) + meta
    (journal / "step-000005" / "host-1-0.groups").write_bytes(record)
    assert_refused(config, "auto", f"the rollout journal {journal} has format 1, ", ": start a new run, or resume ")


def test_a_long_verification_reports_its_progress(tmp_path, monkeypatch):
    config = save(make_config(tmp_path), 2)
    monkeypatch.setattr("megarl.checkpoint.manifest.REPORT_SECONDS", 0.0)
    for which in ("auto", "2"):
        _, messages = find(config, which)
        assert messages == ["comparing step-000002 with its checksums: 0.0 GiB read"] * 3


def test_other_rows_are_refused_but_a_data_file_may_move(tmp_path):
    rows = tmp_path / "data.jsonl"
    rows.write_text('{"prompt": "1 + 1"}\n')
    config = make_config(tmp_path, data={"path": str(rows)})
    draft = CheckpointStore(config.run_dir).begin(2)
    (draft.folder / "config.yaml").write_text(dump_config(config))
    RunState(step=2).write(draft.folder)
    draft.commit(replace(CheckpointMetadata.from_config(config), data={"data.path": hash_file(rows)}), {})
    moved = rows.rename(tmp_path / "moved.jsonl")
    config = make_config(tmp_path, data={"path": str(moved)})
    assert find(config, "auto")[0].checkpoint is not None
    for text, got in (('{"prompt": "1 + 2"}\n', "others"), ('{"prompt": "1 + 1"}\n\n', "21")):
        moved.write_text(text)
        assert_refused(config, "2", "moved.jsonl holds other rows than ", f" needs its 20 bytes, got {got}")
