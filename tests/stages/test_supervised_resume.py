"""Stages without engines that are interrupted and resumed, on two SPMD ranks."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.store import CheckpointStore
from megarl.config import StageConfig
from tests.megatron.ranks import run_ranks
from tests.stages import stage_ranks as stages

DIES_AT = 8
"""Step at whose beginning the run dies: after the checkpoints of steps 3 and 6, of which 6 may be incomplete."""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stages.write_data(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def uninterrupted(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of an uninterrupted SFT run, of which one step is traced on one rank."""
    folder = tmp_path_factory.mktemp("undisturbed")
    traced = stages.trainer(profile={"steps": [2], "ranks": [1]})
    config = stages.stage_config("sft", data_dir, folder / "run", trainer=traced)
    run_ranks(stages.train_uninterrupted, 2, folder, "sft", config)
    return folder / "run"


def test_trace_of_a_step_has_its_forward_and_backward_pass(uninterrupted):
    (file,) = (uninterrupted / "profile").iterdir()
    assert file.name == "step-2-rank-1.json.gz"
    names = {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"aten::mm", "aten::embedding", "aten::embedding_dense_backward"} <= names


def steps_saved(run_dir: Path) -> list[int]:
    return [saved.step for saved in CheckpointStore(run_dir).entries()]


def die(events: Any) -> None:
    raise stages.DiedError


def train_both(stage: str, whole: StageConfig, parts: StageConfig) -> list[str]:
    """Run the stage uninterrupted, then run it until it dies and resume it; return the messages of the resumed run."""
    ranks = stages.join_world()
    stages.train(ranks, stage, whole)
    stages.train(ranks, stage, parts, at_step=(DIES_AT, die))
    return stages.train(ranks, stage, parts, resume="auto")


@pytest.mark.parametrize(
    ("stage", "reference"),
    [
        ("sft", None),
        pytest.param("rm", None, marks=pytest.mark.slow),
        ("dpo", None),
        pytest.param("dpo", {"parallel": {"tp": 2}}, marks=pytest.mark.slow),
    ],
    ids=["sft", "rm", "dpo", "dpo with a separate reference"],
)
def test_resumed_run_is_identical_to_an_uninterrupted_run(stage, reference, data_dir, tmp_path):
    sections = {"dpo": {"reference": {"path": str(data_dir / "model"), **reference}}} if reference else {}
    whole, parts = (stages.stage_config(stage, data_dir, tmp_path / name, **sections) for name in ("whole", "parts"))
    messages = run_ranks(train_both, 2, tmp_path, stage, whole, parts)
    assert re.fullmatch(r"resuming from step [36]: .*/parts/checkpoints/step-00000[36]", messages[0])
    stages.assert_same_results(tmp_path / "parts", tmp_path / "whole")
    assert list(stages.losses(tmp_path / "whole")) == list(range(1, 9))
    assert steps_saved(tmp_path / "whole") == steps_saved(tmp_path / "parts") == [3, 6, 8]
    if stage != "sft":
        before, after = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts"))
        assert (before["eval_before"], before["eval_after"]) == (after["eval_before"], after["eval_after"])


def stop_and_resume(ends: StageConfig, config: StageConfig) -> list[str]:
    ranks = stages.join_world()
    stages.train(ranks, "sft", ends, at_step=(4, lambda events: events.request_stop()))
    return stages.train(ranks, "sft", config, resume="auto")


def test_stop_request_saves_the_last_completed_step(data_dir, tmp_path, uninterrupted):
    rarely = stages.stage_config("sft", data_dir, tmp_path / "run", checkpoint={"every": 100, "keep_last": 9})
    messages = run_ranks(stop_and_resume, 2, tmp_path, rarely, stages.stage_config("sft", data_dir, tmp_path / "run"))
    assert messages[0].startswith("resuming from step 4: ")
    assert steps_saved(tmp_path / "run") == [4, 6, 8]
    stages.assert_same_results(tmp_path / "run", uninterrupted)


def fail_to_write(config: StageConfig) -> list[str]:
    """Fail checkpoints: rank 0 lacks disk space at step 2, rank 1 cannot write at 4, rank 0 cannot write state at 6."""
    from megarl.errors import DataError
    from megarl.megatron.checkpoint import background_writer
    from megarl.run.run_state import RunState

    ranks = stages.join_world()
    write, write_state = background_writer.write_file, RunState.write
    require_disk_space = CheckpointStore.require_disk_space

    def fail_write(path: Path, *arguments: Any) -> Any:
        if ranks.rank == 1 and ".step-000004." in str(path):
            raise OSError(28, "No space left on device")
        return write(path, *arguments)

    def fail_state_write(state: RunState, folder: Path) -> None:
        if state.step == 6:
            raise OSError(28, "No space left on device")
        write_state(state, folder)

    def fail_disk_space(store: CheckpointStore, num_bytes: int, *, step: int) -> None:
        if step == 2:
            raise DataError("there is no room")
        require_disk_space(store, num_bytes, step=step)

    background_writer.write_file = fail_write
    if ranks.rank == 0:
        RunState.write, CheckpointStore.require_disk_space = fail_state_write, fail_disk_space  # type: ignore[method-assign]
    return stages.train(ranks, "sft", config)


def test_checkpoint_is_abandoned_on_all_ranks_if_one_cannot_write(data_dir, tmp_path, uninterrupted):
    config = stages.stage_config("sft", data_dir, tmp_path / "run", checkpoint={"every": 2, "keep_last": 9})
    messages = run_ranks(fail_to_write, 2, tmp_path, config)
    no_room, no_part, no_state = (text for text in messages if "checkpoint failed" in text)
    assert no_room == "step 2: checkpoint failed: there is no room"
    assert re.match(
        r"step 4: checkpoint failed: .* could not be written, on rank 1: .*: No space left on device$", no_part
    )
    assert re.match(r"step 6: checkpoint failed: .* cannot be written: No space left on device$", no_state)
    assert steps_saved(tmp_path / "run") == [8]
    assert not list((tmp_path / "run/checkpoints").glob(".*"))
    stages.assert_same_results(tmp_path / "run", uninterrupted)


def resume_run(config: StageConfig, resume: str) -> list[str]:
    return stages.train(stages.join_world(), "sft", config, resume=resume)


def test_resume_in_another_layout_continues_with_the_same_loss(data_dir, tmp_path, uninterrupted):
    config = stages.stage_config("sft", data_dir, tmp_path / "run", trainer=stages.trainer(parallel={"tp": 2}))
    saved = uninterrupted / "checkpoints/step-000003"
    messages = run_ranks(resume_run, 2, tmp_path, config, str(saved))
    assert messages[:2] == [
        f"resuming from step 3: {saved}",
        "policy: saved with another parallel layout; RNG states are reinitialized",
    ]
    found, expected = stages.losses(tmp_path / "run"), stages.losses(uninterrupted)
    assert list(found) == [4, 5, 6, 7, 8]
    assert found[4] == pytest.approx(expected[4], abs=1e-5)
    assert found == pytest.approx({step: expected[step] for step in found}, abs=1e-3)


@pytest.mark.slow
def test_resume_skips_damaged_checkpoints(data_dir, tmp_path, uninterrupted):
    shutil.copytree(uninterrupted, tmp_path / "run")
    for step in (6, 8):
        part = next((tmp_path / f"run/checkpoints/step-00000{step}/policy").glob("__1_*.distcp"))
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    messages = run_ranks(resume_run, 2, tmp_path, stages.stage_config("sft", data_dir, tmp_path / "run"), "auto")
    assert messages[0].startswith("resuming from step 3: ")
    stages.assert_same_results(tmp_path / "run", uninterrupted)
    assert len(stages.metrics(tmp_path / "run")) == 8
