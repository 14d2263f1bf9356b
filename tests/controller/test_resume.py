"""Which checkpoint `--resume` chooses, what it refuses, and that it changes nothing."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.manifest import CheckpointMetadata
from megarl.checkpoint.store import CheckpointStore
from megarl.checkpoint.verify import hash_file
from megarl.config import RunConfig, SftConfig, StageConfig, dump_config
from megarl.controller.resume import ResumePlan, latest_valid, plan_resume
from megarl.controller.run_stage import RUN_ARTIFACTS
from megarl.errors import ConfigError, DataError
from megarl.run.run_state import RunState
from tests.checkpoint.run_folder import write_format_1_manifest
from tests.run.finished_groups import run_config


def make_config(folder: Path, name: str = "run", **sections: Any) -> RunConfig:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    if not (model / "config.json").exists():
        (model / "config.json").write_text(json.dumps({"architectures": ["Tiny"], "hidden_size": 8}))
    return run_config({"type": "grpo"}, run_dir=str(folder / name), model={"path": str(model)}, **sections)


def save(config: RunConfig, *steps: int) -> None:
    for step in steps:
        draft = CheckpointStore(config.run_dir).begin(step)
        (draft.folder / "policy").mkdir()
        (draft.folder / "policy" / "0.distcp").write_text("weights")
        (draft.folder / "config.yaml").write_text(dump_config(config))
        RunState(step=step).write(draft.folder)
        draft.commit(CheckpointMetadata.from_config(config), {})


def find(config: StageConfig, which: str) -> tuple[ResumePlan, list[str]]:
    messages: list[str] = []
    return plan_resume(config, which, RUN_ARTIFACTS, messages.append), messages


def list_paths(config: RunConfig) -> list[str]:
    return sorted(str(path.relative_to(config.run_dir)) for path in Path(config.run_dir).rglob("*"))


def test_auto_is_the_newest_valid_checkpoint(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save(config, 2, 4, 6)
    folder = CheckpointStore(config.run_dir).folder
    (folder / "step-000006" / "policy" / "0.distcp").write_text("wei")
    before = list_paths(config)
    start, messages = find(config, "auto")
    assert start == ResumePlan(checkpoint=folder / "step-000004")
    assert messages == [
        "checkpoint step-000006 is damaged: policy/0.distcp has 3 bytes, needs 7; step-000004 is used instead"
    ]
    assert list_paths(config) == before


@pytest.mark.parametrize("which", ["auto", "4"])
def test_a_file_with_other_content_is_detected(which: str, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save(config, 2, 4)
    folder = CheckpointStore(config.run_dir).folder
    (folder / "step-000004" / "policy" / "0.distcp").write_text("weighty")
    if which == "auto":
        start, messages = find(config, which)
        assert start.checkpoint == folder / "step-000002"
        assert "step-000004 is damaged: policy/0.distcp has sha256" in messages[0]
    else:
        with pytest.raises(DataError, match=r"step-000004 is damaged: policy/0\.distcp has sha256"):
            find(config, which)
    start, messages = find(make_config(tmp_path, checkpoint={"verify": "sizes"}), which)
    assert start.checkpoint == folder / "step-000004"


def test_without_a_checkpoint_a_run_starts_from_step_0_and_keeps_its_journal(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    start, messages = find(config, "auto")
    assert start.checkpoint is None
    assert {path.name for path in start.to_rotate} == set(RUN_ARTIFACTS) - {"journal"}
    assert messages[0].endswith("has no checkpoint to resume from: the run starts from step 0")


def test_resuming_from_an_earlier_step_rotates_later_checkpoints(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save(config, 2, 4, 6)
    folder = CheckpointStore(config.run_dir).folder
    start, _ = find(config, "2")
    assert start == ResumePlan(
        checkpoint=folder / "step-000002", to_rotate=(folder / "step-000004", folder / "step-000006")
    )


def test_a_checkpoint_of_another_run_starts_a_new_run(tmp_path: Path) -> None:
    other = make_config(tmp_path, "other")
    save(other, 2)
    config = make_config(tmp_path, trainer={"steps": 7})
    start, messages = find(config, f"{other.run_dir}/checkpoints/step-000002")
    assert start.checkpoint == CheckpointStore(other.run_dir).folder / "step-000002"
    assert {path.name for path in start.to_rotate} == set(RUN_ARTIFACTS)
    assert "trainer.steps was 100 in step-000002, is 7" in messages


@pytest.mark.parametrize("which", ["auto", "2"])
def test_incompatible_settings_are_refused_with_every_difference(which: str, tmp_path: Path) -> None:
    save(make_config(tmp_path), 2)
    config = make_config(tmp_path, seed=1, trainer={"optimizer": {"lr": 0.5}, "steps": 7})
    before = list_paths(config)
    with pytest.raises(ConfigError) as error:
        find(config, which)
    text = str(error.value)
    assert all(path in text for path in ("seed", "trainer.optimizer.lr", "trainer.steps"))
    assert list_paths(config) == before


def test_another_agent_is_refused_as_other_sampling_is(tmp_path: Path) -> None:
    save(make_config(tmp_path, rollout={"agent": {"path": "my_agents:run", "kwargs": {"turns": 2}}}), 2)
    agent = {"path": "my_agents:run", "kwargs": {"turns": 3}}
    config = make_config(tmp_path, rollout={"agent": agent, "sampling": {"temperature": 0.5}})
    with pytest.raises(ConfigError) as error:
        find(config, "auto")
    assert "rollout.agent.kwargs.turns: 2 was saved, got 3 (contradicts)" in str(error.value)
    assert "rollout.sampling.temperature: 1.0 was saved, got 0.5 (contradicts)" in str(error.value)


def test_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    save(make_config(tmp_path), 2)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["Tiny"], "hidden_size": 16}))
    with pytest.raises(
        DataError, match=r"^checkpoint step-000002 belongs to another model: needs hidden_size 8, got 16$"
    ):
        find(make_config(tmp_path), "auto")


@pytest.mark.parametrize("which", ["auto", "2"])
def test_a_checkpoint_of_another_command_is_refused(which: str, tmp_path: Path) -> None:
    saved = make_config(tmp_path)
    save(saved, 2)
    tree = {"run_dir": saved.run_dir, "model": saved.model.model_dump(), "data": {"path": "d"}}
    before = list_paths(saved)
    with pytest.raises(ConfigError) as error:
        find(SftConfig.model_validate(tree), which)
    folder = CheckpointStore(saved.run_dir).folder / "step-000002"
    assert str(error.value) == (
        f"--resume: checkpoint {folder} was written by megarl train, and megarl sft cannot resume from it; to start "
        "from its weights, set model.path to its exported model"
    )
    assert list_paths(saved) == before


@pytest.mark.parametrize("which", ["3", "nowhere"])
def test_a_missing_checkpoint_is_reported_with_the_existing_ones(which: str, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save(config, 2)
    with pytest.raises(DataError, match=r"^there is no .*; .* has checkpoints of steps 2$"):
        find(config, which)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("megarl.checkpoint.manifest.Manifest.__init__", _write_newer_format(), raising=True)
        save(config, 2)
    with pytest.raises(
        DataError, match=r"has format 3, but this version of megarl reads format 2: use the newer version "
    ):
        find(config, "auto")


def _write_newer_format() -> Any:
    from megarl.checkpoint.manifest import Manifest

    original = Manifest.__init__

    def init(self: Any, **fields: Any) -> None:
        original(self, **fields, format_version=3)

    return init


@pytest.mark.parametrize("which", ["auto", "4", "step-000004", "path"])
def test_an_older_format_is_refused_and_the_run_does_not_start_over(which: str, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save(config, 2, 4)
    for step in (2, 4):
        write_format_1_manifest(CheckpointStore(config.run_dir).folder / f"step-{step:06d}", step)
    folder = CheckpointStore(config.run_dir).folder / "step-000004"
    before = list_paths(config)
    message = (
        f"checkpoint {folder} has format 1, but this version of megarl reads format 2: start a new run, or resume "
        "with the version that wrote the checkpoint"
    )
    with pytest.raises(DataError) as error:
        find(config, str(folder) if which == "path" else which)
    assert str(error.value) == message
    with pytest.raises(DataError) as error:
        latest_valid(config, str)  # called by a run that has lost its trainer
    assert str(error.value) == message
    assert list_paths(config) == before


def test_if_all_checkpoints_are_damaged_the_run_does_not_start(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save(config, 2, 4)
    for path in Path(config.run_dir).rglob("0.distcp"):
        path.write_text("weighty")
    before = list_paths(config)
    with pytest.raises(DataError, match=r"/checkpoints has no valid checkpoint, all 2 are damaged: "):
        find(config, "auto")
    with pytest.raises(DataError, match=r"/checkpoints has no valid checkpoint, all 2 are damaged: "):
        latest_valid(config, str)  # called by a run that has lost its trainer
    assert list_paths(config) == before


def test_trainer_steps_below_the_checkpoint_step_is_refused(tmp_path: Path) -> None:
    save(make_config(tmp_path), 2, 4)
    config = make_config(tmp_path, trainer={"steps": 3})
    with pytest.raises(ConfigError, match=r"^trainer\.steps needs to be at least 4, the step of step-000004, got 3$"):
        find(config, "auto")
    assert find(config, "2")[0].checkpoint is not None
    assert find(make_config(tmp_path, trainer={"steps": 4}), "auto")[0].checkpoint is not None


def test_a_journal_with_a_missing_step_is_rotated(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    save(config, 2, 4)
    journal = Path(config.run_dir) / "journal"
    for step in (5, 6, 7):
        (journal / f"step-{step:06d}").mkdir(parents=True)
    assert find(config, "auto") == (ResumePlan(checkpoint=CheckpointStore(config.run_dir).folder / "step-000004"), [])
    start, messages = find(config, "2")
    assert journal in start.to_rotate
    assert messages == [f"{journal} has step 7 but not step 3 and is renamed"]
    (journal / "step-000006").rmdir()
    assert journal in find(config, "auto")[0].to_rotate


@pytest.mark.parametrize("steps", [(), (2, 4)])
def test_a_journal_of_the_previous_format_is_refused(tmp_path: Path, steps: tuple[int, ...]) -> None:
    """The first record of a format-1 file has a fingerprint but no format number."""
    config = make_config(tmp_path)
    save(config, *steps)
    journal = Path(config.run_dir) / "journal"
    (journal / "step-000005").mkdir(parents=True)
    meta = b'{"fingerprint": "0123456789abcdef"}'
    head = struct.pack("<4sIIII", b"mgrj", len(meta), 0, zlib.crc32(meta), zlib.crc32(b""))
    record = head + struct.pack("<I", zlib.crc32(head)) + meta
    (journal / "step-000005" / "host-1-0.groups").write_bytes(record)
    before = list_paths(config)
    with pytest.raises(
        DataError, match=rf"^the rollout journal {journal} has format 1, .*: start a new run, or resume "
    ):
        find(config, "auto")
    assert list_paths(config) == before


def test_a_long_verification_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    save(config, 2)
    monkeypatch.setattr("megarl.checkpoint.verify.REPORT_SECONDS", 0.0)
    for which in ("auto", "2"):
        _, messages = find(config, which)
        assert messages == ["comparing step-000002 with its checksums: 0.0 GiB read"] * 3


def test_other_rows_are_refused_but_a_data_file_may_move(tmp_path: Path) -> None:
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
        with pytest.raises(DataError, match=rf"moved\.jsonl holds other rows than .* needs its 20 bytes, got {got}$"):
            find(config, "2")
