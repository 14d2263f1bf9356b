"""The chaos benchmark: which processes it kills and when, and that its comparison detects every difference."""

import json
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.chaos.__main__ import main
from benchmarks.chaos.command import Command
from benchmarks.chaos.compare import compare, is_bitwise_equal, require_complete
from benchmarks.chaos.disturb import FaultInjector, InjectionResult, Kill
from benchmarks.chaos.plan import PlannedKill, plan_kills
from benchmarks.chaos.read import read_last_checkpoint
from benchmarks.chaos.report import make_report
from benchmarks.chaos.show import print_table
from benchmarks.chaos.targets import DEFAULT_TARGETS, ProcessRow, pids_by_target
from benchmarks.chaos.watch import RunWatcher, Span, phases_between
from megarl.errors import DataError
from tests.benchmarks.chaos_runs import (
    PROMPTS,
    SAMPLES,
    STEPS,
    log_step,
    write_checkpoint,
    write_fake_run,
    write_step,
)
from tests.time_limits import HANG_SECONDS

FIELDS = (
    "kills by_target by_phase recovered bitwise_equal prompts_lost prompts_repeated trajectories_repeated "
    "recovery_seconds_p50 recovery_seconds_max orphans"
)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_fake_run(tmp_path_factory.mktemp("original"))


@pytest.fixture
def other(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "other"))


def test_identical_runs_are_equal(original, tmp_path):
    found = compare(original, write_fake_run(tmp_path / "second"))
    assert found.differences == []
    assert found.bitwise_equal
    assert (found.prompts_lost, found.prompts_repeated, found.trajectories_repeated) == (0, 0, 0)


def test_last_checkpoint_is_read_completely(original):
    found = read_last_checkpoint(original)
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(found["policy/optimizer.param"], torch.randn(6, 4, generator=generator))
    assert found["copy/optimizer.param"].dtype == torch.bfloat16
    assert found["policy/rng"] == b"seven"
    assert found["policy/common.pt"]["param_groups"][0]["step"] == STEPS
    assert "state.json/samplers" in found
    assert "state.json/totals" not in found


def flipped(tensor):
    """Return a copy with the lowest bit of one number flipped."""
    bits = tensor.clone().view(torch.int32)
    bits.view(-1)[5] ^= 1
    return bits.view(torch.float32)


@pytest.mark.parametrize("name", ["optimizer.param", "optimizer.exp_avg"])
def test_one_flipped_bit_in_a_checkpoint_is_found(name, original, other):
    found = read_last_checkpoint(original)
    tensors = {key: found[f"policy/{key}"] for key in ("optimizer.param", "optimizer.exp_avg")}
    write_checkpoint(other, tensors | {name: flipped(tensors[name])})
    result = compare(original, other)
    assert not result.bitwise_equal
    assert result.differences[0] == f"checkpoint policy/{name}: differs"
    assert (result.prompts_lost, result.trajectories_repeated) == (0, 0)


def test_one_flipped_bit_in_the_exported_model_is_found(original, other):
    weight = read_last_checkpoint(original)["policy/optimizer.param"]
    save_file({"weight": flipped(weight)}, other / "model" / "model.safetensors")
    assert compare(original, other).differences == ["model model.safetensors: differs"]


def test_older_last_checkpoint_is_a_difference(original, other):
    (other / "checkpoints" / f"step-{STEPS:06d}").rename(other / "checkpoints" / f"step-{STEPS - 1:06d}")
    assert compare(original, other).differences == ["checkpoint name: differs"]


def test_different_sampler_position_is_found(original, other):
    path = other / "checkpoints" / f"step-{STEPS:06d}" / "state.json"
    path.write_text(path.read_text().replace('"position": 12', '"position": 15'))
    assert compare(original, other).differences == ["checkpoint state.json/samplers: differs"]


def test_skipped_prompt_is_lost(original, other):
    # the last step omits its first prompt and has one of a later step
    first = (STEPS - 1) * PROMPTS
    write_step(other, STEPS, [f"train.jsonl:{first + 1 + group}" for group in range(PROMPTS)])
    found = compare(original, other)
    assert (found.prompts_lost, found.prompts_repeated) == (1, 1)
    assert f"prompts of step {STEPS}: differs" in found.differences


def test_prompt_drawn_twice_is_repeated(original, other):
    write_step(other, 2, [f"train.jsonl:{PROMPTS + group}" for group in (0, 0, 2)])
    found = compare(original, other)
    assert (found.prompts_lost, found.prompts_repeated, found.trajectories_repeated) == (1, 1, SAMPLES)


def test_prompts_of_a_missing_step_are_lost(original, other):
    (other / "rollouts" / "step-000003.parquet").unlink()
    found = compare(original, other)
    assert (found.prompts_lost, found.prompts_repeated) == (PROMPTS, 0)
    assert "prompts of step 3: missing" in found.differences


def test_trajectories_of_a_step_logged_twice_are_repeated(original, other):
    log_step(other, 3)
    found = compare(original, other)
    assert found.trajectories_repeated == PROMPTS * SAMPLES
    assert found.differences == ["metrics of step 3: differs"]


def test_step_written_in_place_of_the_next_is_repeated(original, other):
    shutil.copyfile(other / "rollouts" / "step-000002.parquet", other / "rollouts" / "step-000003.parquet")
    found = compare(original, other)
    assert (found.prompts_lost, found.prompts_repeated) == (PROMPTS, PROMPTS)
    assert found.trajectories_repeated == PROMPTS * SAMPLES


def test_different_sample_is_found(original, other):
    write_step(other, 1, [f"train.jsonl:{group}" for group in range(PROMPTS)], shift=1e-6)
    found = compare(original, other)
    assert found.differences == ["trajectories of step 1: differs"]
    assert found.trajectories_repeated == 0


def test_times_may_differ_but_losses_may_not(original, other):
    lines = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(lines.replace('"time/rollout_seconds": 0.5', '"time/rollout_seconds": 9.5'))
    assert compare(original, other).bitwise_equal
    (other / "metrics.jsonl").write_text(lines.replace('"loss": 0.5', '"loss": 0.5000000000000001'))
    assert compare(original, other).differences == ["metrics of step 2: differs"]


def test_empty_run_folder_is_not_equal(original, tmp_path):
    found = compare(original, tmp_path)
    assert not found.bitwise_equal
    assert found.prompts_lost == STEPS * PROMPTS
    require_complete(original)
    with pytest.raises(DataError, match="is incomplete, it has no checkpoint"):
        require_complete(tmp_path)


def test_bitwise_equality_is_strict():
    nan = float("nan")
    assert is_bitwise_equal({"a": [1, (nan, "x")]}, {"a": [1, (nan, "x")]})
    assert not is_bitwise_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert is_bitwise_equal(torch.tensor([nan]), torch.tensor([nan]))
    assert not is_bitwise_equal(torch.zeros(2, 1), torch.zeros(1, 2))
    assert not is_bitwise_equal(1, 1.0)
    assert not is_bitwise_equal([1], [1, 2])


def row(pid, parent, title, **fields):
    return ProcessRow(pid=pid, parent=parent, title=title, **fields)


RUN = [
    row(10, 1, "/usr/bin/python megarl train yaml/demo.yaml"),
    row(11, 10, "/ray/gcs_server --log_dir=x"),
    row(12, 10, "/ray/raylet/raylet --x"),
    row(13, 12, "ray::DashboardAgent"),
    row(14, 12, "ray::Controller.train"),
    row(16, 12, "ray::WorkerHost.invoke"),
    row(15, 12, "ray::WorkerHost"),
    row(17, 12, "ray::AsyncWorkerHost"),
    row(18, 12, "ray::AsyncWorkerHost.invoke"),
    row(19, 17, "sglang::scheduler_TP0"),
    row(20, 17, "/usr/bin/python -c from multiprocessing.resource_tracker import main"),
    row(21, 12, "ray::AsyncWorkerHost.build", has_engine_variable=True),
    row(22, 12, "ray::IDLE"),
]


def test_processes_are_assigned_to_targets():
    assert pids_by_target(RUN, driver=10) == {
        "driver": [10],
        "controller": [14],
        "trainer": [15, 16],
        "engine": [17, 21],
        "rollout_worker": [18],
        "scheduler": [19],
    }
    assert pids_by_target([], driver=10) == {}


STEADY = [Span(phase="rollout", begin=0.0, seconds=0.8), Span(phase="train", begin=0.8, seconds=0.4)]
TIMELINE = {0: [Span(phase="start", begin=0, seconds=20)], **dict.fromkeys(range(1, 61), STEADY)}


def plan(seed, count=20, timeline=TIMELINE):
    return plan_kills(count, seed=seed, targets=DEFAULT_TARGETS, timeline=timeline)


def test_seed_determines_all_kills():
    assert plan(3) == plan(3)
    assert plan(3) != plan(4)


@pytest.mark.parametrize("seed", range(20))
def test_kills_are_spread_over_steps_targets_and_phases(seed):
    kills = plan(seed)
    assert sorted(kill.target for kill in kills) == sorted(DEFAULT_TARGETS * 4)
    calm = [kill for kill in kills if kill.recovery_share is None]
    assert len(calm) == 18
    assert kills[0] in calm
    steps = [kill.after_step for kill in calm]
    # a kill affects two steps
    assert all(after - before >= 2 for before, after in pairwise(steps))
    assert steps[0] <= 2
    assert 55 <= steps[-1] <= 60
    assert {"rollout", "train"} <= {kill.phase for kill in kills}
    for kill in kills:
        span = next(span for span in TIMELINE[kill.after_step] if span.phase == kill.phase)
        assert span.begin <= kill.offset <= span.begin + span.seconds
        assert kill.recovery_share is None or 0 <= kill.recovery_share < 1


def test_more_kills_than_steps_can_be_planned():
    assert len(plan(0, count=10, timeline={0: STEADY, 1: STEADY})) == 10
    assert plan(0, count=1, timeline={0: []})[0].phase == "start"


def beat(folder, phase, since, written=None):
    times = {"phase_since": since, "time": written or since}
    text = {name: datetime.fromtimestamp(when, UTC).isoformat() for name, when in times.items()}
    (folder / "heartbeat.json").write_text(json.dumps(text | {"phase": phase, "step": 0}))


def test_watcher_reads_steps_and_the_phases_between_them(tmp_path):
    start = time.time() - 30
    watch = RunWatcher(tmp_path, start)
    watch.poll()
    assert watch.steps_done == 0
    beat(tmp_path, "", start + 1)
    watch.poll()
    beat(tmp_path, "evaluate", start + 20, start + 21)
    watch.poll()
    log_step(tmp_path, 1, **{"time/step_seconds": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "eval/score": 1.0}\n{"step": 2, "half')
    watch.poll()
    assert watch.steps_done == 1
    line = watch.line_times[1]
    beat(tmp_path, "export", line + 2, line + 3)
    watch.poll()
    timeline = watch.timeline(line + 5)
    assert [span.phase for span in timeline[0]] == ["start", "evaluate", "rollout", "train"]
    at, evaluate, rollout, train = timeline[0]
    assert (at.begin, at.seconds) == pytest.approx((1, 19), abs=0.01)
    assert evaluate.begin == pytest.approx(20, abs=0.01)
    assert rollout.begin == pytest.approx(line - start - 1.0, abs=0.01)
    assert (train.begin, train.seconds) == pytest.approx((rollout.begin + 0.5, 0.25))
    assert [span.phase for span in timeline[1]] == ["export"]


def test_watcher_follows_a_run_that_resumes_from_an_earlier_step(tmp_path):
    watch = RunWatcher(tmp_path, time.time())
    for step in (1, 2, 3):
        log_step(tmp_path, step)
    watch.poll()
    assert watch.steps_done == 3
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(lines[0])
    watch.poll()
    assert watch.steps_done == 1


def test_interval_without_lines_and_heartbeats_has_no_phases():
    assert phases_between(0.0, 5.0, None, None) == []


def test_command_finds_its_orphaned_processes(tmp_path, monkeypatch):
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
        deadline = time.monotonic() + HANG_SECONDS
        while (code := command.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert code == 3
        assert command.log_tail() == "train x.yaml --resume auto"
        # the children are copies of the shell until they have started their programs
        while (titles := sorted(row.title for row in command.table())) != ["sleep 6000", "sleep 6001"]:
            assert time.monotonic() < deadline, titles
            time.sleep(0.01)
        command.kill(next(row.pid for row in command.table() if row.title == "sleep 6000"))
        (orphan,) = [name for name in command.orphans() if name.startswith("process")]
        assert orphan.endswith("sleep 6001")
    finally:
        command.end()
        command.remove_temporary()
    while command.table():
        assert time.monotonic() < deadline, command.table()
        time.sleep(0.01)
    assert not command.temporary.exists()


class FakeCommand:
    """Finishes a step every 20 ms, pauses for 200 ms after a kill, and fails if a pid in `fatal` is killed."""

    driver = 10

    def __init__(self, folder, *, steps, fatal=()):
        self.folder, self.steps, self.fatal = folder, steps, fatal
        self.started, self.killed, self.done, self.code = [], [], 0, None

    def start(self, *more):
        self.started.append(more)
        self.code, self.next = None, time.time() + 0.02

    def exit_code(self):
        if self.code is None and time.time() > self.next:
            if self.done == self.steps:
                self.code = 0
            else:
                self.done += 1
                log_step(self.folder, self.done)
                self.next = time.time() + 0.02
        return self.code

    def find_live_processes(self):
        return []

    def table(self):
        return [row for row in RUN if row.pid not in self.killed]

    def kill(self, pid):
        self.killed.append(pid)
        if pid in self.fatal:
            self.code = 1
        self.next = time.time() + 0.2

    def end(self):
        pass

    def log_tail(self):
        return "log tail"


def planned(target, after_step, recovery_share=None, draw=0.0, offset=0.0):
    more = {"phase": "train", "offset": offset, "recovery_share": recovery_share}
    return PlannedKill(target=target, after_step=after_step, draw=draw, **more)


def test_processes_are_killed_as_planned(tmp_path):
    command, messages = FakeCommand(tmp_path, steps=12), []
    kills = [
        planned("engine", 2),
        planned("trainer", 5, draw=0.9),
        planned("controller", 5, 0.0),
        planned("engine", 11),
    ]
    found = FaultInjector(command, tmp_path, kills, messages.append).run()
    assert (found.finished, found.restarts, found.failures) == (True, 0, [])
    assert command.killed == [17, 16, 14, 21]
    assert command.started == [()]
    assert [kill.phase for kill in found.kills] == ["train", "train", "recovery", "train"]
    first, second, third, last = found.kills
    assert 2 <= first.after_step < first.recovered_by <= second.after_step
    assert third.after_step - second.after_step in (0, 1)
    assert last.recovered_by == 13
    assert all(kill.recovered and 0.2 < kill.seconds < 2 for kill in found.kills)
    assert len(messages) == 8


def test_kills_are_on_time_if_the_run_is_faster_than_planned(tmp_path):
    command = FakeCommand(tmp_path, steps=12)
    found = FaultInjector(
        command, tmp_path, [planned("engine", 0, offset=60), planned("engine", 6, offset=60)], str
    ).run()
    assert [kill.after_step for kill in found.kills] == [1, 7]


def test_run_that_does_not_recover_is_restarted(tmp_path):
    command = FakeCommand(tmp_path, steps=8, fatal=[14, 10])
    kills = [planned("controller", 2), planned("driver", 5)]
    found = FaultInjector(command, tmp_path, kills, str).run()
    assert command.started == [(), ("--resume", "auto"), ("--resume", "auto")]
    assert (found.finished, found.restarts) == (True, 2)
    # a killed driver cannot restart itself: the benchmark restarts it
    assert [kill.recovered for kill in found.kills] == [False, True]
    (failure,) = found.failures
    assert failure.endswith("log tail")


def test_run_that_cannot_resume_is_aborted(tmp_path):
    command = FakeCommand(tmp_path, steps=8)
    command.exit_code = lambda: 1
    found = FaultInjector(command, tmp_path, [planned("engine", 2)], str).run()
    assert (found.finished, len(found.failures), found.kills) == (False, 3, [])


def report(original, other, orphans=()):
    kills = [
        Kill(
            target="engine", pid=1, phase="train", after_step=1, when=0.0, recovered_by=3, recovered=True, seconds=4.0
        ),
        Kill(
            target="engine", pid=2, phase="rollout", after_step=4, when=0.0, recovered_by=6, recovered=True, seconds=9.0
        ),
        Kill(target="trainer", pid=3, phase="train", after_step=7, when=0.0, recovered_by=9),
    ]
    return make_report(
        InjectionResult(kills=kills, restarts=1, failures=["gone"], finished=True, seconds=60.0),
        compare(original, other),
        orphans=orphans,
        kills_asked=3,
        steps=STEPS,
        seed=0,
        seconds_undisturbed=30.0,
    )


def test_report_counts_kills_and_recoveries(original, other, capsys):
    made = report(original, other, ["process 9 ray::WorkerHost"])
    assert (made.kills, made.recovered, made.orphans, made.restarts) == (3, 2, 1, 1)
    assert made.by_target == {"engine": 2, "trainer": 1}
    assert made.by_phase == {"rollout": 1, "train": 2}
    assert (made.recovery_seconds_p50, made.recovery_seconds_max) == (6.5, 9.0)
    assert made.recovery_seconds_by_target == {"engine": 6.5}
    assert made.bitwise_equal
    assert not made.is_clean
    print_table(made)
    shown = capsys.readouterr().out
    assert "trainer" in shown
    assert "process 9 ray::WorkerHost" in shown


def test_report_is_written_as_a_table(monkeypatch, original, other, tmp_path):
    made = report(original, other)
    monkeypatch.setattr("benchmarks.chaos.__main__._run", lambda args, notify: made)
    assert run(monkeypatch, "--write", tmp_path / "results" / "chaos.md") == 1
    written = (tmp_path / "results" / "chaos.md").read_text()
    assert "\npython -m benchmarks.chaos --write " in written
    table = [line.strip("| ").split(" | ") for line in written.splitlines() if line.startswith("|")]
    assert ["recovery, median", "6.5 s"] in table
    assert ["kills", "3"] in table


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["benchmarks.chaos", *map(str, args)])
    return main()


def test_json_has_stable_fields(monkeypatch, capsys, original, other):
    made = report(original, other)
    monkeypatch.setattr("benchmarks.chaos.__main__._run", lambda args, notify: made)
    assert run(monkeypatch, "--json") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert list(json.loads(line))[:11] == FIELDS.split()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--kills=0"], "--kills needs at least 1, got 0"),
        (["--set", "tracking.rollouts=false"], "tracking.rollouts and tracking.jsonl need true"),
        (["--set", "checkpoint.every=0"], "checkpoint.every needs at least 1"),
    ],
)
def test_invalid_arguments_are_refused(monkeypatch, capsys, tmp_path, args, message):
    assert run(monkeypatch, "--work", tmp_path / "work", *args) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_hundred_kills_of_the_demo_lose_nothing(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.chaos",
        "--kills=100",
        "--seed=1",
        "--json",
        "--work",
        tmp_path / "work",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found = json.loads(done.stdout)
    assert (found["kills"], found["recovered"]) == (100, 100), found["failures"]
    assert set(found["by_target"]) == set(DEFAULT_TARGETS)
    assert found["bitwise_equal"], found["differences"]
    assert (found["prompts_lost"], found["prompts_repeated"], found["trajectories_repeated"]) == (0, 0, 0)
    assert found["orphans"] == 0, found["orphan_names"]
