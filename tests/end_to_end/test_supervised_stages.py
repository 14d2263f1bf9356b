"""SFT, reward-model and DPO runs on Ray and under torchrun: errors, signals, the same results after a resumption."""

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megarl.checkpoint.store import CheckpointStore
from megarl.config import load_resolved
from tests.end_to_end.launched import RAY_AGENTS, LaunchedCommand, process_title
from tests.end_to_end.tiny_world import write_sft
from tests.megatron.ranks import run_ranks
from tests.model_files.fake_hub import serve_hub
from tests.stages import stage_ranks as stages

TWO_RANKS = ("--standalone", "--nproc-per-node", "2", "-m")


def errors(run: LaunchedCommand) -> list[str]:
    """Return the error lines of the ranks on stderr, without torchrun's own report."""
    return [line for line in run.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"placement": {"slots_per_node": 4}},
            "placement: needs as many slots as torchrun has ranks, got nodes * slots_per_node = 1 * 4 = 4, torchrun's "
            "world size = 2 (without nodes and slots_per_node, the world decides)",
        ),
        pytest.param({"trainer": {"stepz": 3}}, "{config}: trainer.stepz: unknown key", marks=pytest.mark.slow),
        pytest.param({"data": {"path": "nothing.jsonl"}}, "data.path: ", marks=pytest.mark.slow),
    ],
)
def test_configuration_error_of_all_ranks_is_reported_once(sections, message, world, tmp_path, launch):
    config = write_sft(world, tmp_path, **sections)
    run = launch(*TWO_RANKS, "megarl", "sft", config, program="torchrun")
    assert run.wait() == 1  # torchrun's
    (error,) = errors(run)
    assert error.startswith("error: " + message.replace("{config}", str(config)))
    assert "exitcode  : 2" in run.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["error", "exception", "SIGKILL"])
def test_failing_rank_ends_the_others(how, world, tmp_path, launch):
    config = write_sft(world, tmp_path)
    run = launch(*TWO_RANKS, "tests.end_to_end.torchrun_stage", "sft", config, how, program="torchrun")
    assert run.wait() == 1
    found = errors(run)
    match how:
        case "error":
            assert found == ["error: rank 1 has read something bad"]
        case "exception":
            assert found == ["error: the run failed on rank 1:"]
            assert "ZeroDivisionError: of no use" in run.stderr
        case "SIGKILL":
            assert len(found) <= 1
            assert "Signal 9 (SIGKILL)" in run.stderr
    run.assert_no_processes_left()


@pytest.mark.slow
def test_torchrun_can_forward_sigusr1(world, tmp_path, launch):
    config = write_sft(world, tmp_path, trainer={"steps": 100_000, "batch_size": 8})
    signals = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout", "60")
    run = launch(*TWO_RANKS[:-1], *signals, "-m", "megarl", "sft", config, program="torchrun")
    run.wait_for_step(3)
    run.send(signal.SIGUSR1)
    assert run.wait() == 1  # torchrun's
    assert f"stopped after step {run.steps_done()} of 100000 on SIGUSR1; model exported to " in run.stderr
    assert (tmp_path / "run/model/model.safetensors").exists()
    run.assert_no_processes_left()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_is_reported_once(number, world, tmp_path, launch):
    config = write_sft(world, tmp_path, trainer={"steps": 100_000, "batch_size": 8})
    logs = tmp_path / "logs"
    arguments = (*TWO_RANKS[:-1], "--log-dir", logs, "--redirects", "3", "-m", "megarl", "sft", config)
    run = launch(*arguments, program="torchrun")
    run.wait_for_step(3)
    run.send(number, group=number == signal.SIGINT)
    run.wait()
    run.assert_no_processes_left()
    first, second = (next(logs.glob(f"*/*/{rank}/stderr.log")).read_text() for rank in (0, 1))
    assert first == "error: interrupted\n"
    assert second == ""


STEPS, EVERY = 40, 5
ENDLESS = 1_000_000
"""Number of steps of runs that are killed or stopped; a resumed run gets a smaller one."""
TORCHRUN = ("--standalone", "--nproc-per-node", "2", "-m", "megarl")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stages.write_data(tmp_path_factory.mktemp("small"))


def sections(steps: int, every: int = EVERY) -> dict[str, Any]:
    return {"trainer": stages.trainer(steps=steps, eval_every=20), "checkpoint": {"every": every, "keep_last": 9}}


def write(stage: str, small: Path, folder: Path, *, run: str = "run", steps: int = STEPS, **changed: Any) -> Path:
    """Write the YAML file of a run with the folder `folder`/`run`, and return its path."""
    path = folder / f"{stage}.yaml"
    path.write_text(yaml.safe_dump(stages.stage_tree(stage, small, folder / run, **(sections(steps) | changed))))
    return path


def undisturbed(stage: str, small: Path, folder: Path, steps: int = STEPS) -> Path:
    """Train without a disturbance; return the run folder."""
    config = stages.stage_config(stage, small, folder / "undisturbed", **sections(steps))
    run_ranks(stages.train_uninterrupted, 2, folder, stage, config)
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


def test_sft_resumes_after_losing_a_torchrun_rank_with_the_results_of_a_run_on_ray(small, tmp_path, launch):
    """With pipeline parallelism, where the rank with the results is not the one that writes files."""

    def write_sft(steps, run="run"):
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
    stages.assert_same_results(tmp_path / "run", tmp_path / "on-ray")
    resolved = [(tmp_path / folder / "sft.yaml").read_text() for folder in ("run", "on-ray")]
    assert resolved[0] == resolved[1].replace(f"{tmp_path}/on-ray", f"{tmp_path}/run")
    on_ray.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "victim"), [("sft", "command"), ("rm", "rank"), ("dpo", "command")])
def test_stage_killed_on_ray_resumes(stage, victim, small, tmp_path, launch):
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
    stages.assert_same_results(tmp_path / "run", undisturbed(stage, small, tmp_path, stopped_at + 3))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM on Ray", "SIGUSR1 in torchrun"])
def test_stop_signal_saves_a_checkpoint(how, small, tmp_path, launch):
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
    stages.assert_same_results(tmp_path / "run", undisturbed("sft", small, tmp_path, step + 3))


@pytest.mark.slow
def test_dpo_resumes_with_one_rank_instead_of_two(small, tmp_path, launch):
    """Resumes on Ray what torchrun ranks saved, in another folder."""
    reference = undisturbed("dpo", small, tmp_path)
    saved = reference / "checkpoints/step-000020"
    run = launch("dpo", write("dpo", small, tmp_path, placement={"slots_per_node": 1}), "--resume", saved)
    assert run.wait() == 0, run.stderr
    found, expected = stages.losses(tmp_path / "run"), stages.losses(reference)
    assert list(found) == list(range(21, STEPS + 1))
    assert found[21] == pytest.approx(expected[21], abs=1e-5)
    assert f"resuming from step 20: {saved}" in run.stdout


@pytest.mark.slow
def test_resumed_run_uses_the_commit_that_it_began_with(world, tmp_path, launch, monkeypatch):
    files = {file.name: file.read_bytes() for file in (world / "model").iterdir()}
    config = write_sft(world, tmp_path, model={"path": "org/tiny"}, checkpoint={"every": 1})
    patient = {"HF_HUB_ETAG_TIMEOUT": "1200", "HF_HUB_DOWNLOAD_TIMEOUT": "1200"}
    for name, value in {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        **patient,
    }.items():
        monkeypatch.setenv(name, value)
    with serve_hub() as hub:
        commit = hub.commit("org/tiny", files)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        first = launch("sft", str(config))
        assert first.wait() == 0, first.stderr
        assert f"model.path: org/tiny is commit {commit}, in {tmp_path}/hf/hub/" in first.stderr
        assert hub.commit("org/tiny", {**files, "chat_template.jinja": b"{{ messages }}"}) != commit
        again = launch("sft", str(config), "--resume", "auto", "--set", "trainer.steps=4")
        assert again.wait() == 0, again.stderr
    resolved = load_resolved(tmp_path / "run" / "sft.yaml")
    assert resolved.model.hub_revisions == {"org/tiny": commit}
    assert Path(resolved.model.path).name == commit
    saved = yaml.safe_load((tmp_path / "run/checkpoints/step-000004/config.yaml").read_text())
    assert saved["model"] == resolved.model.model_dump(mode="json")
