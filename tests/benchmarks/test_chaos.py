"""The chaos benchmark: which processes it kills and when, and that its comparison detects every difference."""

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.chaos.command import Command
from benchmarks.chaos.compare import compare, is_bitwise_equal, require_complete
from benchmarks.chaos.plan import plan_kills
from benchmarks.chaos.read import read_last_checkpoint
from benchmarks.chaos.targets import DEFAULT_TARGETS, ProcessRow, pids_by_target
from benchmarks.chaos.watch import RunWatcher, Span, phases_between
from megarl.batch.trajectory import Trajectory
from megarl.errors import DataError
from megarl.tracking.tracker import write_rollouts
from tests.benchmarks.fake_reports import log_step
from tests.end_to_end.launched import has_ended, run_program
from tests.errors import expect_error
from tests.time_limits import wait_until

STEPS, PROMPTS, SAMPLES = 4, 3, 2
NAMES = ("optimizer.param", "optimizer.exp_avg")


def write_run(folder: Path) -> Path:
    """Write the files of a run that the comparison reads."""
    for step in range(1, STEPS + 1):
        write_step(folder, step)
        log_step(folder, step)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(6, 4, generator=generator) for name in NAMES}
    write_checkpoint(folder, tensors)
    (folder / "model").mkdir()
    save_file({"weight": tensors[NAMES[0]]}, folder / FILE)
    return folder


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint with the folders of two models, the second a bfloat16 copy of the first."""
    at = folder / "checkpoints" / f"step-{STEPS:06d}"
    shutil.rmtree(at, ignore_errors=True)
    for name, state in (("policy", tensors), ("copy", {k: v.bfloat16() for k, v in tensors.items()})):
        save(state | {"rng": b"seven"}, storage_writer=FileSystemWriter(at / name), no_dist=True)
        torch.save({"param_groups": [{"lr": 1e-4, "step": STEPS}]}, at / name / "common.pt")
    state = {"samplers": {"train": {"epoch": 0, "position": 12}}, "totals": {"seconds": torch.rand(1).item()}}
    (at / "state.json").write_text(json.dumps(state))


def write_step(folder: Path, step: int, prompts: Iterable[int] = range(PROMPTS), *, shift: float = 0.0) -> None:
    """Write the trajectories of a step, whose prompts count from its first one; `shift` changes a log-probability."""
    trajectories = []
    for group, prompt in enumerate(prompts):
        for sample in range(SAMPLES):
            rng = np.random.default_rng([step, group, sample])
            trajectories.append(
                Trajectory(
                    prompt_id=f"train.jsonl:{(step - 1) * PROMPTS + prompt}",
                    group_id=group,
                    token_ids=rng.integers(0, 99, 5).astype(np.int32),
                    loss_mask=np.array([False, False, True, True, True]),
                    logprobs=rng.standard_normal(5).astype(np.float32) + np.float32(shift),
                    policy_versions=np.full(5, step - 1, np.int32),
                    reward=1.0,
                )
            )
    path = folder / "rollouts" / f"step-{step:06d}.parquet"
    write_rollouts(path, trajectories, [0.5] * len(trajectories), step=step, decode=str)


def flip(run: Path, name: str) -> torch.Tensor:
    """Flip the lowest bit of one number of a tensor of the checkpoint; return the tensor."""
    tensors = {each: read_last_checkpoint(run)[f"policy/{each}"] for each in NAMES}
    tensors[name].view(torch.int32).view(-1)[5] ^= 1
    write_checkpoint(run, tensors)
    return tensors[name]


def replace(run: Path, file: str, old: str, new: str) -> None:
    text = (run / file).read_text()
    assert old in text
    (run / file).write_text(text.replace(old, new))


AT, LOG = f"checkpoints/step-{STEPS:06d}", "metrics.jsonl"
SECOND, THIRD = (f"rollouts/step-00000{step}.parquet" for step in (2, 3))
FILE = "model/a.safetensors"
CHANGES: list[tuple[Callable[[Path], object], tuple[int, int, int], str]] = [
    (lambda run: flip(run, NAMES[0]), (0, 0, 0), "checkpoint policy/optimizer.param: differs"),
    (lambda run: flip(run, NAMES[1]), (0, 0, 0), "checkpoint policy/optimizer.exp_avg: differs"),
    (lambda run: save_file({"weight": flip(run, NAMES[0])}, run / FILE), (0, 0, 0), "model a.safetensors: differs"),
    (lambda run: (run / AT).rename(run / "checkpoints/step-000003"), (0, 0, 0), "checkpoint name: differs"),
    (lambda run: replace(run, f"{AT}/state.json", "12", "15"), (0, 0, 0), "checkpoint state.json/samplers: differs"),
    (lambda run: write_step(run, STEPS, (1, 2, 3)), (1, 1, SAMPLES), "prompts of step 4: differs"),
    (lambda run: write_step(run, 2, (0, 0, 2)), (1, 1, SAMPLES), "prompts of step 2: differs"),
    (lambda run: (run / THIRD).unlink(), (PROMPTS, 0, 0), "prompts of step 3: missing"),
    (lambda run: log_step(run, 3), (0, 0, PROMPTS * SAMPLES), "metrics of step 3: differs"),
    (lambda run: shutil.copy(run / SECOND, run / THIRD), (3, 3, PROMPTS * SAMPLES), "prompts of step 3: differs"),
    (lambda run: write_step(run, 1, shift=1e-6), (0, 0, 0), "trajectories of step 1: differs"),
    (lambda run: replace(run, LOG, "0.5, ", f"{0.5 + 2**-53}, "), (0, 0, 0), "metrics of step 2: differs"),
    (lambda run: replace(run, LOG, '_seconds": 0.25', '_seconds": 0.5'), (0, 0, 0), ""),
]
"""Change of a run, prompts lost and repeated and trajectories repeated, and a difference that is listed."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("original"))


@pytest.mark.parametrize(("change", "counts", "difference"), CHANGES, ids=[each[2] or "times" for each in CHANGES])
def test_the_comparison_finds_a_change(change, counts, difference, original, tmp_path):
    with expect_error(DataError, "incomplete", "checkpoint"):
        require_complete(tmp_path)
    change(write_run(tmp_path))  # equal but for the total
    require_complete(original)
    found = compare(original, tmp_path)
    assert (found.prompts_lost, found.prompts_repeated, found.trajectories_repeated) == counts
    assert found.bitwise_equal is (difference == "") is (found.differences == [])
    assert difference == "" or difference in found.differences


def test_bitwise_equality_is_strict():
    nan = float("nan")
    assert is_bitwise_equal({"a": [1, (nan, "x")]}, {"a": [1, (nan, "x")]})
    assert is_bitwise_equal(torch.tensor([nan]), torch.tensor([nan]))
    zero = torch.zeros(2, 1)
    for one, other in ((zero, -zero), (zero, zero.T), (zero, zero.bfloat16()), (1, 1.0), ([1], [1, 2])):
        assert not is_bitwise_equal(one, other)


RUN = """\
10 1 /usr/bin/python megarl train yaml/demo.yaml
12 10 /ray/raylet/raylet --x
14 12 ray::Controller.train
16 12 ray::WorkerHost.invoke
15 12 ray::WorkerHost
17 12 ray::AsyncWorkerHost
18 12 ray::AsyncWorkerHost.invoke
19 17 sglang::scheduler_TP0
20 17 /usr/bin/python -c from multiprocessing.resource_tracker import main
21 12 ray::AsyncWorkerHost.build
22 12 ray::IDLE"""
ROWS = [
    ProcessRow(pid=int(pid), parent=int(parent), title=title, has_engine_variable=pid == "21")
    for pid, parent, title in (line.split(maxsplit=2) for line in RUN.splitlines())
]


def test_processes_are_assigned_to_targets():
    engines = {"engine": [17, 21], "rollout_worker": [18], "scheduler": [19]}
    assert pids_by_target(ROWS, driver=10) == {"driver": [10], "controller": [14], "trainer": [15, 16], **engines}
    assert pids_by_target([], driver=10) == {}


STEADY = [Span(phase="rollout", begin=0.0, seconds=0.8), Span(phase="train", begin=0.8, seconds=0.4)]
TIMELINE = {0: [Span(phase="start", begin=0, seconds=20)], **dict.fromkeys(range(1, 61), STEADY)}


def test_kills_are_spread_over_steps_targets_and_phases():
    for seed in range(20):
        kills = plan_kills(20, seed=seed, targets=DEFAULT_TARGETS, timeline=TIMELINE)
        assert kills == plan_kills(20, seed=seed, targets=DEFAULT_TARGETS, timeline=TIMELINE)
        assert sorted(kill.target for kill in kills) == sorted(DEFAULT_TARGETS * 4)
        steps = [kill.after_step for kill in kills if kill.recovery_share is None]
        assert len(steps) == 18
        assert steps[0] <= 2 < 55 <= steps[-1] <= 60
        assert all(after - before >= 2 for before, after in pairwise(steps))  # a kill affects two steps
        assert {"rollout", "train"} <= {kill.phase for kill in kills}
        for kill in kills:
            span = next(span for span in TIMELINE[kill.after_step] if span.phase == kill.phase)
            assert span.begin <= kill.offset <= span.begin + span.seconds


def test_more_kills_than_steps_and_steps_without_phases_can_be_planned():
    assert len(plan_kills(10, seed=0, targets=DEFAULT_TARGETS, timeline={0: STEADY, 1: STEADY})) == 10
    assert plan_kills(1, seed=0, targets=DEFAULT_TARGETS, timeline={0: []})[0].phase == "start"


def test_a_command_finds_its_orphaned_processes(tmp_path, monkeypatch):
    program = tmp_path / "megarl"
    # a child in its own session whose parent ends: only the mark identifies it
    program.write_text('#!/bin/sh\nsetsid sleep 6000 &\nsetsid sleep 6001 >/dev/null &\necho "$@"; exit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("benchmarks.chaos.command.END_SECONDS", 0.2)
    monkeypatch.setattr("benchmarks.chaos.command.AGENTS_END_SECONDS", 0.4)
    command = Command(["train", "x.yaml"], tmp_path / "log")
    try:
        command.start("--resume", "auto")
        assert wait_until(lambda: command.exit_code() is not None)
        assert (command.exit_code(), command.log_tail()) == (3, "train x.yaml --resume auto")
        # the children are copies of the shell until they have started their programs
        assert wait_until(lambda: sorted(row.title for row in command.table()) == ["sleep 6000", "sleep 6001"])
        command.kill(next(row.pid for row in command.table() if row.title == "sleep 6000"))
        assert wait_until(lambda: len(command.table()) == 1)
        (orphan,) = [name for name in command.orphans() if name.startswith("process")]
        assert orphan.endswith("sleep 6001")
    finally:
        command.end()
        command.remove_temporary()
    assert wait_until(lambda: not command.table())
    assert not command.temporary.exists()


KILLED_STARTER = """
import os, signal, sys
from pathlib import Path
from benchmarks.chaos.command import Command
folder = Path(sys.argv[1])
sys.executable = str(folder / "python")
command = Command([], folder / "log")
command.start()
print(command.driver, command.temporary, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_command_dies_with_the_process_that_started_it(tmp_path):
    program = tmp_path / "megarl"
    program.write_text("#!/bin/sh\nexec sleep 6000\n")
    program.chmod(0o755)
    done = run_program(sys.executable, "-c", KILLED_STARTER, tmp_path)
    assert done.returncode == -signal.SIGKILL
    driver, temporary = done.stdout.split()
    Path(temporary).rmdir()
    assert wait_until(lambda: not psutil.pid_exists(int(driver)) or has_ended(psutil.Process(int(driver))))


def test_the_watcher_reads_steps_and_the_phases_between_them(tmp_path, monkeypatch):
    begin = 1e9
    watch = RunWatcher(tmp_path, begin)

    def poll(seconds):
        monkeypatch.setattr("benchmarks.chaos.watch.time", SimpleNamespace(time=lambda: begin + seconds))
        watch.poll()

    def beat(phase, since, written):
        times = {"phase_since": since, "time": written}
        text = {name: datetime.fromtimestamp(begin + when, UTC).isoformat() for name, when in times.items()}
        (tmp_path / "heartbeat.json").write_text(json.dumps(text | {"phase": phase, "step": 0}))
        poll(written)

    poll(0)
    assert watch.steps_done == 0
    beat("", 1, 1)
    beat("evaluate", 20, 21)
    log_step(tmp_path, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "eval/score": 1.0}\n{"step": 2, "half')
    poll(30)
    assert watch.steps_done == 1
    beat("export", 32, 33)
    timeline = watch.timeline(begin + 35)
    assert [(span.phase, span.begin, span.seconds) for step in (0, 1) for span in timeline[step]] == [
        ("start", 1, 19),
        ("evaluate", 20, 1),
        ("rollout", 29, 0.5),
        ("train", 29.5, 0.25),
        ("export", 2, 1),
    ]
    (tmp_path / "metrics.jsonl").write_text("")  # as after a restart without a checkpoint
    poll(40)
    assert watch.steps_done == 0
    assert phases_between(0.0, 5.0, None, None) == []


@pytest.mark.slow
def test_hundred_kills_of_the_demo_lose_nothing(tmp_path):
    options = ["--kills=100", "--seed=1", "--json", "--work", tmp_path / "work"]
    command = [sys.executable, "-m", "benchmarks.chaos", *options]
    found = json.loads(run_program(*command, timeout=None).stdout)
    assert (found["kills"], found["recovered"]) == (100, 100), found["failures"]
    assert set(found["by_target"]) == set(DEFAULT_TARGETS)
    assert found["bitwise_equal"], found["differences"]
    assert (found["prompts_lost"], found["prompts_repeated"], found["trajectories_repeated"]) == (0, 0, 0)
    assert found["orphans"] == 0, found["orphan_names"]
