"""Fine-tuning and learning from pairs that end at some step and go on, on two ranks that run the loop themselves."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.store import CheckpointStore
from megarl.config import StageConfig
from tests.megatron.ranks import run_ranks
from tests.stages.stage_ranks import (
    DiedError,
    assert_same,
    join,
    losses,
    metrics,
    stage_config,
    train,
    train_whole,
    trainer,
    write_data,
)

DIES = 8
"""While this step is begun; checkpoints of steps 3 and 6 have been, and the second may be whole by then or not."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fine-tuning that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(train_whole, 2, folder, "sft", stage_config("sft", world, folder / "run"))
    return folder / "run"


def steps_saved(run_dir: Path) -> list[int]:
    return [saved.step for saved in CheckpointStore(run_dir).saved()]


def die(events: Any) -> None:
    raise DiedError


def train_both(stage: str, whole: StageConfig, parts: StageConfig) -> list[str]:
    """One undisturbed, one that dies and goes on."""
    ranks = join()
    train(ranks, stage, whole)
    train(ranks, stage, parts, at_step=(DIES, die))
    return train(ranks, stage, parts, resume="auto")


@pytest.mark.parametrize(
    ("stage", "reference"),
    [
        ("sft", None),
        pytest.param("rm", None, marks=pytest.mark.slow),
        ("dpo", None),
        pytest.param("dpo", {"parallel": {"tp": 2}}, marks=pytest.mark.slow),
    ],
    ids=["sft", "rm", "dpo", "dpo with a reference of its own"],
)
def test_one_that_died_comes_to_the_same(stage: str, reference: Any, world: Path, tmp_path: Path) -> None:
    sections = {"dpo": {"reference": {"path": str(world / "model"), **reference}}} if reference else {}
    whole, parts = (stage_config(stage, world, tmp_path / name, **sections) for name in ("whole", "parts"))
    said = run_ranks(train_both, 2, tmp_path, stage, whole, parts)
    assert re.fullmatch(r"resuming from step [36]: .*/parts/checkpoints/step-00000[36]", said[0])
    assert_same(tmp_path / "parts", tmp_path / "whole")
    assert list(losses(tmp_path / "whole")) == list(range(1, 9))
    assert steps_saved(tmp_path / "whole") == steps_saved(tmp_path / "parts") == [3, 6, 8]
    if stage != "sft":
        before, after = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts"))
        assert (before["eval_before"], before["eval_after"]) == (after["eval_before"], after["eval_after"])


def end_and_go_on(ends: StageConfig, config: StageConfig) -> list[str]:
    ranks = join()
    train(ranks, "sft", ends, at_step=(4, lambda events: events.request_stop()))
    return train(ranks, "sft", config, resume="auto")


def test_asked_to_end_it_saves_the_step_before(world: Path, tmp_path: Path, undisturbed: Path) -> None:
    rarely = stage_config("sft", world, tmp_path / "run", checkpoint={"every": 100, "keep_last": 9})
    said = run_ranks(end_and_go_on, 2, tmp_path, rarely, stage_config("sft", world, tmp_path / "run"))
    assert said[0].startswith("resuming from step 4: ")
    assert steps_saved(tmp_path / "run") == [4, 6, 8]
    assert_same(tmp_path / "run", undisturbed)


def fail_to_write(config: StageConfig) -> list[str]:
    """At step 2 rank 0 has no room, at step 4 rank 1 cannot write its part, at step 6 rank 0 not the state."""
    from megarl.errors import DataError
    from megarl.megatron.checkpoint import background_writer
    from megarl.run.run_state import RunState

    ranks = join()
    write, write_state, require_room = background_writer._write, RunState.write, CheckpointStore.require_room

    def refuse(path: Path, *arguments: Any) -> Any:
        if ranks.rank == 1 and ".step-000004." in str(path):
            raise OSError(28, "No space left on device")
        return write(path, *arguments)

    def refuse_state(state: RunState, folder: Path) -> None:
        if state.step == 6:
            raise OSError(28, "No space left on device")
        write_state(state, folder)

    def refuse_room(store: CheckpointStore, num_bytes: int, *, step: int) -> None:
        if step == 2:
            raise DataError("there is no room")
        require_room(store, num_bytes, step=step)

    background_writer._write = refuse
    if ranks.rank == 0:
        RunState.write, CheckpointStore.require_room = refuse_state, refuse_room  # type: ignore[method-assign]
    return train(ranks, "sft", config)


def test_what_one_rank_cannot_write_all_give_up(world: Path, tmp_path: Path, undisturbed: Path) -> None:
    config = stage_config("sft", world, tmp_path / "run", checkpoint={"every": 2, "keep_last": 9})
    said = run_ranks(fail_to_write, 2, tmp_path, config)
    no_room, no_part, no_state = (text for text in said if "no checkpoint" in text)
    assert no_room == "step 2: no checkpoint: there is no room"
    assert re.match(r"step 4: no checkpoint: .* could not be written, on rank 1: .*: No space left on device$", no_part)
    assert re.match(r"step 6: no checkpoint: .* cannot be written: No space left on device$", no_state)
    assert steps_saved(tmp_path / "run") == [8]
    assert not list((tmp_path / "run/checkpoints").glob(".*"))
    assert_same(tmp_path / "run", undisturbed)


def go_on(config: StageConfig, resume: str) -> list[str]:
    return train(join(), "sft", config, resume=resume)


def test_another_layout_goes_on_with_the_same_loss(world: Path, tmp_path: Path, undisturbed: Path) -> None:
    config = stage_config("sft", world, tmp_path / "run", trainer=trainer(parallel={"tp": 2}))
    saved = undisturbed / "checkpoints/step-000003"
    said = run_ranks(go_on, 2, tmp_path, config, str(saved))
    assert said[:2] == [
        f"resuming from step 3: {saved}",
        "policy: saved in another layout; the random numbers of its ranks begin anew",
    ]
    found, expected = losses(tmp_path / "run"), losses(undisturbed)
    assert list(found) == [4, 5, 6, 7, 8]
    assert found[4] == pytest.approx(expected[4], abs=1e-5)
    assert found == pytest.approx({step: expected[step] for step in found}, abs=1e-3)


@pytest.mark.slow
def test_of_a_damaged_checkpoint_the_one_before_is_used(world: Path, tmp_path: Path, undisturbed: Path) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    for step in (6, 8):
        part = next((tmp_path / f"run/checkpoints/step-00000{step}/policy").glob("__1_*.distcp"))
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    said = run_ranks(go_on, 2, tmp_path, stage_config("sft", world, tmp_path / "run"), "auto")
    assert said[0].startswith("resuming from step 3: ")
    assert_same(tmp_path / "run", undisturbed)
    assert len(metrics(tmp_path / "run")) == 8
