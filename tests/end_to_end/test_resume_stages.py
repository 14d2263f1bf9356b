"""SFT, reward-model and DPO runs that are killed or stopped resume with the same results."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megarl.checkpoint.store import CheckpointStore
from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import RAY_AGENTS, LaunchedCommand, process_title
from tests.megatron.ranks import run_ranks
from tests.stages.stage_ranks import (
    assert_same_results,
    losses,
    stage_config,
    stage_tree,
    train_uninterrupted,
    trainer,
    write_data,
)

STEPS, EVERY = 40, 5
SECTIONS: dict[str, Any] = {
    "trainer": trainer(steps=STEPS, eval_every=20),
    "checkpoint": {"every": EVERY, "keep_last": 9},
}

TORCHRUN = ("--standalone", "--nproc-per-node", "2", "-m", "megarl")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `model/` and `data/`."""
    return write_data(tmp_path_factory.mktemp("small"))


def write(stage: str, small: Path, folder: Path, **sections: Any) -> Path:
    """Write the YAML file of a run with the folder `folder`/run, and return its path."""
    path = folder / f"{stage}.yaml"
    path.write_text(yaml.safe_dump(stage_tree(stage, small, folder / "run", **(SECTIONS | sections))))
    return path


def undisturbed(stage: str, small: Path, folder: Path) -> Path:
    """Train without a disturbance; return the run folder."""
    run_ranks(train_uninterrupted, 2, folder, stage, stage_config(stage, small, folder / "undisturbed", **SECTIONS))
    return folder / "undisturbed"


def steps_saved(folder: Path) -> list[int]:
    return [saved.step for saved in CheckpointStore(folder / "run").entries()]


def rank(number: int, run: LaunchedCommand) -> psutil.Process:
    """Return the process of one of torchrun's ranks."""
    (process,) = (p for p in run.find_live_processes() if p.environ().get("RANK") == str(number))
    return process


def finish(command: LaunchedCommand, stopped_at: int) -> None:
    """Wait until the command has finished, and check that it resumed from a checkpoint up to step `stopped_at`."""
    assert command.wait() == 0, command.stderr
    resumed = re.search(r"^resuming from step (\d+): ", command.stdout, re.MULTILINE)
    assert resumed is not None, command.stdout
    assert 0 < int(resumed[1]) <= stopped_at < STEPS


def test_sft_resumes_after_losing_a_torchrun_rank(small: Path, tmp_path: Path, launch: Launch) -> None:
    config = write("sft", small, tmp_path)
    run = launch(*TORCHRUN, "sft", config, program="torchrun")
    run.wait_until(lambda: len(steps_saved(tmp_path)) >= 2)
    rank(1, run).kill()
    assert run.wait() == 1  # torchrun's
    run.assert_no_processes_left()
    again = launch(*TORCHRUN, "sft", config, "--resume", "auto", program="torchrun")
    finish(again, run.steps_done())
    assert_same_results(tmp_path / "run", undisturbed("sft", small, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "victim"), [("sft", "command"), ("rm", "rank"), ("dpo", "command")])
def test_stage_killed_on_ray_resumes(stage: str, victim: str, small: Path, tmp_path: Path, launch: Launch) -> None:
    config = write(stage, small, tmp_path)
    run = launch(stage, config)
    run.wait_until(lambda: len(steps_saved(tmp_path)) >= 2)
    if victim == "command":
        run.send(signal.SIGKILL)
        run.wait()
    else:
        next(p for p in run.find_live_processes() if process_title(p).startswith("ray::WorkerHost")).kill()
        assert run.wait() == 1
    run.assert_no_processes_left(but=RAY_AGENTS)
    stopped_at = run.steps_done()
    finish(launch(stage, config, "--resume", "auto"), stopped_at)
    assert_same_results(tmp_path / "run", undisturbed(stage, small, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM on Ray", "SIGUSR1 in torchrun"])
def test_stop_signal_saves_a_checkpoint(how: str, small: Path, tmp_path: Path, launch: Launch) -> None:
    arguments: Sequence[Any] = (*TORCHRUN, "sft") if "torchrun" in how else ("sft",)
    program = "torchrun" if "torchrun" in how else "megarl"
    config = write("sft", small, tmp_path, checkpoint={"every": 1000})
    run = launch(*arguments, config, program=program)
    run.wait_for_step(7)
    if program == "torchrun":
        rank(1, run).send_signal(signal.SIGUSR1)
        assert run.wait() == 1  # torchrun's
    else:
        run.send(signal.SIGTERM)
        assert run.wait() == 75
    step = run.steps_done()
    assert steps_saved(tmp_path) == [step]
    assert f"stopped after step {step} of {STEPS} on {how.split()[0]}; model exported to " in run.stderr
    finish(launch(*arguments, write("sft", small, tmp_path), "--resume", "auto", program=program), step)
    assert_same_results(tmp_path / "run", undisturbed("sft", small, tmp_path))


@pytest.mark.slow
def test_dpo_resumes_with_one_rank_instead_of_two(small: Path, tmp_path: Path, launch: Launch) -> None:
    """Resumes on Ray what torchrun ranks saved, in another folder."""
    reference = undisturbed("dpo", small, tmp_path)
    saved = reference / "checkpoints/step-000020"
    run = launch("dpo", write("dpo", small, tmp_path, placement={"slots_per_node": 1}), "--resume", saved)
    assert run.wait() == 0, run.stderr
    found, expected = losses(tmp_path / "run"), losses(reference)
    assert list(found) == list(range(21, STEPS + 1))
    assert found[21] == pytest.approx(expected[21], abs=1e-5)
    assert f"resuming from step 20: {saved}" in run.stdout


@pytest.mark.slow
def test_incompatible_checkpoint_is_refused_with_one_error(small: Path, tmp_path: Path, launch: Launch) -> None:
    """Under torchrun only rank 0 checks and reports."""
    undisturbed("dpo", small, tmp_path)
    saved = tmp_path / "undisturbed/checkpoints/step-000040"
    other = trainer(steps=STEPS, batch_size=4, eval_every=20)
    for stage, sections, sentence in [
        ("dpo", {"trainer": other}, "trainer.batch_size: 6 was saved, got 4 (contradicts)"),
        ("sft", {}, f"checkpoint {saved} was written by megarl dpo, and megarl sft cannot resume from it"),
    ]:
        config = write(stage, small, tmp_path, **sections)
        run = launch(*TORCHRUN, stage, config, "--resume", saved, program="torchrun")
        assert run.wait() == 1  # torchrun's
        assert run.stderr.count(sentence) == 1, run.stderr
        assert run.stderr.count("error: ") == 1
        assert "exitcode  : 2" in run.stderr
        assert not (tmp_path / "run/metrics.jsonl").exists()
