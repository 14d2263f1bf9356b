"""Exit codes and messages of commands that are refused or end early; none of their processes may remain.

`test_schedules.py` has the exit code of a run that SIGUSR1 ends after a step, and `test_resume.py` that of one that
Ctrl-C ends.
"""

import re
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.placement.hardware import visible_gpu_names
from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import LaunchedCommand, process_title
from tests.end_to_end.pausing import pause_file
from tests.end_to_end.scaled_weights import SCALED_PUSH
from tests.end_to_end.tiny_world import write_run

LOOK = """
import sys
from megarl.cli.main import main
code = main(sys.argv[1:])
assert not {"ray", "torch", "transformers"} & sys.modules.keys(), "imports that take seconds"
sys.exit(code)
"""


def test_unknown_key_is_refused_immediately(world, tmp_path):
    command = [sys.executable, "-c", LOOK, "train", write_run(world, tmp_path), "--set", "trainer.optimiser.lr=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert "trainer.optimiser" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(bool(visible_gpu_names()), reason="this machine has a GPU")
def test_cuda_is_refused_without_gpus(world, tmp_path, launch):
    command = launch("train", write_run(world, tmp_path), "--set", "placement.device=cuda")
    assert command.wait() == 2
    assert command.stderr.startswith("error: ")
    assert "placement.device: cuda needs nodes * slots_per_node = 1 * 2 = 2 GPUs, this machine has 0" in command.stderr
    command.assert_no_processes_left()
    assert list(command.temporary.iterdir()) == []


LONG = {"trainer": {"steps": 100_000}, "placement": {"slots_per_node": 1}}
"""Sections of a long run on one slot, which starts faster."""


def start_long_run(launch: Launch, world: Path, folder: Path, **sections: Any) -> LaunchedCommand:
    run = launch("train", write_run(world, folder, **LONG, **sections))
    run.wait_for_step(3)
    assert {"ray::Controller", "sglang::scheduler"} <= {process_title(p) for p in run.find_live_processes()}
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "process"),
    [("SIGUSR1", "raylet"), *product(("SIGUSR1", "Ctrl-C"), ("ray::AsyncWorkerHost.build", "sglang::scheduler"))],
)
@pytest.mark.usefixtures("importable_tests")
def test_run_ended_during_startup_runs_no_step(how, process, world, tmp_path, launch):
    """The run waits for the signal once it has started, which it may have by the time that the process is found."""
    waits = pause_file(tmp_path / "run", 0)
    waits.touch()
    algorithm = {"type": "tests.end_to_end.pausing:Pausing", "kl_loss": None, "group_size": 4}
    run = launch("train", write_run(world, tmp_path, **LONG, algorithm=algorithm))
    run.wait_until(lambda: any(process in process_title(p) for p in run.find_live_processes()))
    if how == "Ctrl-C":
        run.send(signal.SIGINT, group=True)
        assert run.wait() == 130
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
    else:
        for each in run.find_live_processes():
            each.send_signal(signal.SIGUSR1)
        waits.unlink()
        assert run.wait() == 75
        assert run.stderr == "stopped before the first of 100000 steps on SIGUSR1\n"
    assert not (tmp_path / "run" / "model").exists()
    run.assert_nothing_left()


@pytest.mark.slow
def test_processes_and_shared_memory_are_gone_after_the_driver_is_killed(world, tmp_path, launch):
    run = start_long_run(launch, world, tmp_path)
    run.send(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    run.assert_no_processes_left()
    assert not [path for path in run.find_leftovers() if path.startswith("/dev/shm")]


@pytest.mark.slow
def test_killed_engine_without_restarts_ends_the_run_with_its_log_tail(world, tmp_path, launch):
    run = start_long_run(launch, world, tmp_path, recovery={"max_restarts": 0})
    scheduler = next(p for p in run.find_live_processes() if process_title(p) == "sglang::scheduler")
    scheduler.kill()
    assert run.wait() == 1
    log = tmp_path / "run" / "logs" / "engine-0" / f"scheduler-{scheduler.pid}.log"
    # contained anywhere: during a weight sync the error begins with the name of the engine
    assert run.stderr.startswith("error: ")
    assert f"the engine's scheduler process of TP rank 0 was ended by SIGKILL; the end of {log}:\n" in run.stderr
    assert log.read_text().splitlines()[-1] in run.stderr
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.usefixtures("importable_tests")
def test_an_engine_matrix_scaled_by_a_quarter_ends_the_run_with_exit_code_3(world, tmp_path, launch):
    """In bfloat16, with the limits by default; the steps before pass them."""
    algorithm = {"type": "tests.end_to_end.scaled_weights:ScaledAfterPush", "kl_loss": None, "group_size": 4}
    model = {"path": str(world / "model"), "dtype": "bfloat16"}
    run = launch("train", write_run(world, tmp_path, **LONG, algorithm=algorithm, model=model))
    assert run.wait() == 3
    started = re.match(
        r"error: step (\d+): train_infer_mismatch/kl = (\S+) passed limits.logprob_kl = (\S+) ", run.stderr
    )
    assert started is not None, run.stderr
    assert int(started[1]) in (SCALED_PUSH + 1, SCALED_PUSH + 2)
    assert float(started[2]) > float(started[3])
    assert f"in the last {SCALED_PUSH} steps; 6.3e-08 to 9.6e-06 in bfloat16 in the demo)" in run.stderr
    assert "trainer and engine disagree about the log-probability of a sampled token" in run.stderr
    run.assert_nothing_left()
