"""What `--resume` finds, refuses and leaves alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.manifest import Contents
from megarl.checkpoint.store import CheckpointStore
from megarl.checkpoint.verify import hash_file
from megarl.config import RunConfig, SftConfig, StageConfig, dump_config
from megarl.controller.resume import Start, find_start, newest_whole
from megarl.controller.run_stage import RESULTS
from megarl.errors import ConfigError, DataError
from megarl.run.run_state import RunState
from tests.run.finished_groups import run_config


def make(folder: Path, name: str = "run", **sections: Any) -> RunConfig:
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
        draft.commit(Contents.of(config), {})


def find(config: StageConfig, which: str) -> tuple[Start, list[str]]:
    said: list[str] = []
    return find_start(config, which, RESULTS, said.append), said


def there(config: RunConfig) -> list[str]:
    return sorted(str(path.relative_to(config.run_dir)) for path in Path(config.run_dir).rglob("*"))


def test_auto_is_the_newest_that_is_whole(tmp_path: Path) -> None:
    config = make(tmp_path)
    save(config, 2, 4, 6)
    folder = CheckpointStore(config.run_dir).folder
    (folder / "step-000006" / "policy" / "0.distcp").write_text("wei")
    before = there(config)
    start, said = find(config, "auto")
    assert start == Start(checkpoint=folder / "step-000004")
    assert said == [
        "checkpoint step-000006 is damaged: policy/0.distcp has 3 bytes, needs 7; step-000004 is used instead"
    ]
    assert there(config) == before


@pytest.mark.parametrize("which", ["auto", "4"])
def test_a_file_that_holds_something_else_is_found(which: str, tmp_path: Path) -> None:
    config = make(tmp_path)
    save(config, 2, 4)
    folder = CheckpointStore(config.run_dir).folder
    (folder / "step-000004" / "policy" / "0.distcp").write_text("weighty")
    if which == "auto":
        start, said = find(config, which)
        assert start.checkpoint == folder / "step-000002"
        assert "step-000004 is damaged: policy/0.distcp has sha256" in said[0]
    else:
        with pytest.raises(DataError, match=r"step-000004 is damaged: policy/0\.distcp has sha256"):
            find(config, which)
    start, said = find(make(tmp_path, checkpoint={"verify": "sizes"}), which)
    assert start.checkpoint == folder / "step-000004"


def test_without_a_checkpoint_a_run_begins_anew_and_keeps_its_journal(tmp_path: Path) -> None:
    config = make(tmp_path)
    start, said = find(config, "auto")
    assert start.checkpoint is None
    assert {path.name for path in start.stale} == set(RESULTS) - {"journal"}
    assert said[0].endswith("has no checkpoint to go on from: the run begins anew")


def test_an_earlier_step_sets_later_ones_aside(tmp_path: Path) -> None:
    config = make(tmp_path)
    save(config, 2, 4, 6)
    folder = CheckpointStore(config.run_dir).folder
    start, _ = find(config, "2")
    assert start == Start(checkpoint=folder / "step-000002", stale=(folder / "step-000004", folder / "step-000006"))


def test_another_run_s_checkpoint_begins_a_run_of_its_own(tmp_path: Path) -> None:
    other = make(tmp_path, "other")
    save(other, 2)
    config = make(tmp_path, trainer={"steps": 7})
    start, said = find(config, f"{other.run_dir}/checkpoints/step-000002")
    assert start.checkpoint == CheckpointStore(other.run_dir).folder / "step-000002"
    assert {path.name for path in start.stale} == set(RESULTS)
    assert "trainer.steps was 100 in step-000002, is 7" in said


@pytest.mark.parametrize("which", ["auto", "2"])
def test_other_settings_are_refused_with_every_difference(which: str, tmp_path: Path) -> None:
    save(make(tmp_path), 2)
    config = make(tmp_path, seed=1, trainer={"optimizer": {"lr": 0.5}, "steps": 7})
    before = there(config)
    with pytest.raises(ConfigError) as error:
        find(config, which)
    text = str(error.value)
    assert all(path in text for path in ("seed", "trainer.optimizer.lr", "trainer.steps"))
    assert there(config) == before


def test_another_model_is_refused_by_what_differs(tmp_path: Path) -> None:
    save(make(tmp_path), 2)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["Tiny"], "hidden_size": 16}))
    with pytest.raises(DataError, match=r"^checkpoint step-000002 is of another model: needs hidden_size 8, got 16$"):
        find(make(tmp_path), "auto")


@pytest.mark.parametrize("which", ["auto", "2"])
def test_what_another_command_has_saved_is_refused(which: str, tmp_path: Path) -> None:
    saved = make(tmp_path)
    save(saved, 2)
    tree = {"run_dir": saved.run_dir, "model": saved.model.model_dump(), "data": {"path": "d"}}
    before = there(saved)
    with pytest.raises(ConfigError) as error:
        find(SftConfig.model_validate(tree), which)
    folder = CheckpointStore(saved.run_dir).folder / "step-000002"
    assert str(error.value) == (
        f"--resume: checkpoint {folder} is of a run of megarl train, and megarl sft cannot go on from it; a model that "
        "it has exported can be model.path"
    )
    assert there(saved) == before


@pytest.mark.parametrize("which", ["3", "nowhere"])
def test_what_is_not_there_is_told_with_what_is(which: str, tmp_path: Path) -> None:
    config = make(tmp_path)
    save(config, 2)
    with pytest.raises(DataError, match=r"^there is no .*; .* has those of steps 2$"):
        find(config, which)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("megarl.checkpoint.manifest.Manifest.__init__", _newer(), raising=True)
        save(config, 2)
    with pytest.raises(DataError, match=r"is of format 2, this megarl reads up to 1; needs a newer megarl$"):
        find(config, "auto")


def _newer() -> Any:
    from megarl.checkpoint.manifest import Manifest

    original = Manifest.__init__

    def init(self: Any, **fields: Any) -> None:
        original(self, **fields, format_version=2)

    return init


def test_where_all_are_damaged_nothing_begins_anew(tmp_path: Path) -> None:
    config = make(tmp_path)
    save(config, 2, 4)
    for path in Path(config.run_dir).rglob("0.distcp"):
        path.write_text("weighty")
    before = there(config)
    with pytest.raises(DataError, match=r"/checkpoints has no checkpoint that is whole, of 2: "):
        find(config, "auto")
    with pytest.raises(DataError, match=r"/checkpoints has no checkpoint that is whole, of 2: "):
        newest_whole(config, str)  # what a run asks that has lost its trainer
    assert there(config) == before


def test_fewer_steps_than_were_done_are_refused(tmp_path: Path) -> None:
    save(make(tmp_path), 2, 4)
    config = make(tmp_path, trainer={"steps": 3})
    with pytest.raises(ConfigError, match=r"^trainer\.steps needs to be at least 4, of which step-000004 is, got 3$"):
        find(config, "auto")
    assert find(config, "2")[0].checkpoint is not None
    assert find(make(tmp_path, trainer={"steps": 4}), "auto")[0].checkpoint is not None


def test_a_journal_that_lacks_a_step_is_set_aside(tmp_path: Path) -> None:
    config = make(tmp_path)
    save(config, 2, 4)
    journal = Path(config.run_dir) / "journal"
    for step in (5, 6, 7):
        (journal / f"step-{step:06d}").mkdir(parents=True)
    assert find(config, "auto") == (Start(checkpoint=CheckpointStore(config.run_dir).folder / "step-000004"), [])
    start, said = find(config, "2")
    assert journal in start.stale
    assert said == [f"{journal} has step 7 and not step 3, and is set aside"]
    (journal / "step-000006").rmdir()
    assert journal in find(config, "auto")[0].stale


def test_a_long_comparison_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(tmp_path)
    save(config, 2)
    monkeypatch.setattr("megarl.checkpoint.verify.TELL_SECONDS", 0.0)
    for which in ("auto", "2"):
        _, said = find(config, which)
        assert said == ["comparing step-000002 with its checksums: 0.0 GiB read"] * 3


def test_other_rows_are_refused_and_a_file_may_move(tmp_path: Path) -> None:
    rows = tmp_path / "data.jsonl"
    rows.write_text('{"prompt": "1 + 1"}\n')
    config = make(tmp_path, data={"path": str(rows)})
    draft = CheckpointStore(config.run_dir).begin(2)
    (draft.folder / "config.yaml").write_text(dump_config(config))
    RunState(step=2).write(draft.folder)
    draft.commit(replace(Contents.of(config), data=hash_file(rows)), {})
    moved = rows.rename(tmp_path / "moved.jsonl")
    config = make(tmp_path, data={"path": str(moved)})
    assert find(config, "auto")[0].checkpoint is not None
    for text, got in (('{"prompt": "1 + 2"}\n', "others"), ('{"prompt": "1 + 1"}\n\n', "21")):
        moved.write_text(text)
        with pytest.raises(DataError, match=rf"moved\.jsonl holds other rows than .* needs its 20 bytes, got {got}$"):
            find(config, "2")
