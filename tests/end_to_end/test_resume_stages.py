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
ENDLESS = 1_000_000
"""Number of steps of runs that are killed or stopped; a resumed run gets a smaller one."""

TORCHRUN = ("--standalone", "--nproc-per-node", "2", "-m", "megarl")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `model/` and `data/`."""
    return write_data(tmp_path_factory.mktemp("small"))


def sections(steps: int, every: int = EVERY) -> dict[str, Any]:
    """Return the sections of a run with that many steps, and a checkpoint every few steps."""
    return {
        "trainer": trainer(steps=steps, eval_every=20),
        "checkpoint": {"every": every, "keep_last": 9},
    }


def write(stage: str, small: Path, folder: Path, *, run: str = "run", steps: int = STEPS, **changed: Any) -> Path:
    """Write the YAML file of a run with the folder `folder`/`run`, and return its path."""
    path = folder / f"{stage}.yaml"
    path.write_text(yaml.safe_dump(stage_tree(stage, small, folder / run, **(sections(steps) | changed))))
    return path


def undisturbed(stage: str, small: Path, folder: Path, steps: int = STEPS) -> Path:
    """Train without a disturbance; return the run folder."""
    config = stage_config(stage, small, folder / "undisturbed", **sections(steps))
    run_ranks(train_uninterrupted, 2, folder, stage, config)
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
    assert 0 < int(resumed[1]) <= stopped_at


def test_sft_resumes_after_losing_a_torchrun_rank_with_the_results_of_a_run_on_ray(
    small: Path, tmp_path: Path, launch: Launch
) -> None:
    """With pipeline parallelism, where the rank with the results is not the one that writes files."""

    def write_sft(steps: int, run: str = "run") -> Path:
        changed = sections(steps)["trainer"] | {"parallel": {"pp": 2}}
        return write("sft", small, tmp_path, run=run, trainer=changed)

    run = launch(*TORCHRUN, "sft", write_sft(ENDLESS), program="torchrun")
    run.wait_until(lambda: len(steps_saved(tmp_path)) >= 2)
    rank(1, run).kill()
    assert run.wait() == 1  # torchrun's
    run.assert_no_processes_left()
    stopped_at = run.steps_done()
    last = stopped_at + 3
    again = launch(*TORCHRUN, "sft", write_sft(last), "--resume", "auto", program="torchrun")
    finish(again, stopped_at)
    lines = [re.split(r"  |,", line)[0] for line in again.stdout.splitlines()]
    assert f"step {last}/{last}" in lines
    assert lines[-2:] == [f"step {last}: checkpoint step-{last:06d}", "model"]
    on_ray = launch("sft", write_sft(last, "on-ray"))
    assert on_ray.wait() == 0, on_ray.stderr
    assert_same_results(tmp_path / "run", tmp_path / "on-ray")
    resolved = [(tmp_path / folder / "sft.yaml").read_text() for folder in ("run", "on-ray")]
    assert resolved[0] == resolved[1].replace(f"{tmp_path}/on-ray", f"{tmp_path}/run")
    on_ray.assert_no_processes_left()
    assert on_ray.find_leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "victim"), [("sft", "command"), ("rm", "rank"), ("dpo", "command")])
def test_stage_killed_on_ray_resumes(stage: str, victim: str, small: Path, tmp_path: Path, launch: Launch) -> None:
    run = launch(stage, write(stage, small, tmp_path, steps=ENDLESS))
    run.wait_until(lambda: len(steps_saved(tmp_path)) >= 2)
    if victim == "command":
        run.send(signal.SIGKILL)
        run.wait()
    else:
        next(p for p in run.find_live_processes() if process_title(p).startswith("ray::WorkerHost")).kill()
        assert run.wait() == 1
    run.assert_no_processes_left(but=RAY_AGENTS)
    stopped_at = run.steps_done()
    finish(launch(stage, write(stage, small, tmp_path, steps=stopped_at + 3), "--resume", "auto"), stopped_at)
    assert_same_results(tmp_path / "run", undisturbed(stage, small, tmp_path, stopped_at + 3))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM on Ray", "SIGUSR1 in torchrun"])
def test_stop_signal_saves_a_checkpoint(how: str, small: Path, tmp_path: Path, launch: Launch) -> None:
    arguments: Sequence[Any] = (*TORCHRUN, "sft") if "torchrun" in how else ("sft",)
    program = "torchrun" if "torchrun" in how else "megarl"
    rarely = sections(ENDLESS, every=ENDLESS)
    run = launch(*arguments, write("sft", small, tmp_path, **rarely), program=program)
    run.wait_for_step(7)
    if program == "torchrun":
        rank(1, run).send_signal(signal.SIGUSR1)  # all ranks end after the same step
        assert run.wait() == 1  # torchrun's
        assert set(re.findall(r"exitcode  : (\S+)", run.stderr)) == {"75"}
    else:
        run.send(signal.SIGTERM)
        assert run.wait() == 75
    step = run.steps_done()
    assert steps_saved(tmp_path) == [step]
    assert run.stderr.count(f"stopped after step {step} of {ENDLESS} on {how.split()[0]}; model exported to ") == 1
    config = write("sft", small, tmp_path, steps=step + 3)
    finish(launch(*arguments, config, "--resume", "auto", program=program), step)
    assert_same_results(tmp_path / "run", undisturbed("sft", small, tmp_path, step + 3))


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
