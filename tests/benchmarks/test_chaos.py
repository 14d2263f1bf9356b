"""The benchmark that kills: whom, when, and that its comparison finds what a kill may break."""

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
from benchmarks.chaos.compare import compare, require_whole, same
from benchmarks.chaos.disturb import Disturbance, Disturbed, Kill
from benchmarks.chaos.plan import PlannedKill, plan_kills
from benchmarks.chaos.read import read_last_checkpoint
from benchmarks.chaos.report import make_report
from benchmarks.chaos.show import print_table
from benchmarks.chaos.targets import USUAL, ProcessRow, by_target
from benchmarks.chaos.watch import Span, Watch, stretch
from megarl.errors import DataError
from tests.benchmarks.chaos_runs import (
    PROMPTS,
    SAMPLES,
    STEPS,
    log_step,
    write_checkpoint,
    write_made_up_run,
    write_step,
)

FIELDS = (
    "kills by_target by_phase recovered bitwise_equal prompts_lost prompts_repeated trajectories_repeated "
    "recovery_seconds_p50 recovery_seconds_max orphans"
)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_made_up_run(tmp_path_factory.mktemp("original"))


@pytest.fixture
def other(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "other"))


def test_a_run_written_anew_is_equal(original, tmp_path):
    found = compare(original, write_made_up_run(tmp_path / "again"))
    assert found.differences == []
    assert found.bitwise_equal
    assert (found.prompts_lost, found.prompts_repeated, found.trajectories_repeated) == (0, 0, 0)


def test_a_checkpoint_is_read_whole(original):
    found = read_last_checkpoint(original)
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(found["policy/optimizer.param"], torch.randn(6, 4, generator=generator))
    assert found["copy/optimizer.param"].dtype == torch.bfloat16
    assert found["policy/rng"] == b"seven"
    assert found["policy/common.pt"]["param_groups"][0]["step"] == STEPS
    assert "state.json/samplers" in found
    assert "state.json/books" not in found


def flipped(tensor):
    """With the lowest bit of one number turned."""
    bits = tensor.clone().view(torch.int32)
    bits.view(-1)[5] ^= 1
    return bits.view(torch.float32)


@pytest.mark.parametrize("name", ["optimizer.param", "optimizer.exp_avg"])
def test_one_bit_of_a_checkpoint(name, original, other):
    found = read_last_checkpoint(original)
    tensors = {key: found[f"policy/{key}"] for key in ("optimizer.param", "optimizer.exp_avg")}
    write_checkpoint(other, tensors | {name: flipped(tensors[name])})
    result = compare(original, other)
    assert not result.bitwise_equal
    assert result.differences[0] == f"checkpoint policy/{name}: differs"
    assert (result.prompts_lost, result.trajectories_repeated) == (0, 0)


def test_one_bit_of_the_exported_model(original, other):
    weight = read_last_checkpoint(original)["policy/optimizer.param"]
    save_file({"weight": flipped(weight)}, other / "model" / "model.safetensors")
    assert compare(original, other).differences == ["model model.safetensors: differs"]


def test_an_older_checkpoint_is_another(original, other):
    (other / "checkpoints" / f"step-{STEPS:06d}").rename(other / "checkpoints" / f"step-{STEPS - 1:06d}")
    assert compare(original, other).differences == ["checkpoint name: differs"]


def test_a_sampler_that_stands_elsewhere(original, other):
    path = other / "checkpoints" / f"step-{STEPS:06d}" / "state.json"
    path.write_text(path.read_text().replace('"position": 12', '"position": 15'))
    assert compare(original, other).differences == ["checkpoint state.json/samplers: differs"]


def test_a_prompt_is_skipped(original, other):
    # the last step has the prompts from the second on, and one that was not due yet
    first = (STEPS - 1) * PROMPTS
    write_step(other, STEPS, [f"train.jsonl:{first + 1 + group}" for group in range(PROMPTS)])
    found = compare(original, other)
    assert (found.prompts_lost, found.prompts_repeated) == (1, 1)
    assert f"prompts of step {STEPS}: differs" in found.differences


def test_a_prompt_is_drawn_twice(original, other):
    write_step(other, 2, [f"train.jsonl:{PROMPTS + group}" for group in (0, 0, 2)])
    found = compare(original, other)
    assert (found.prompts_lost, found.prompts_repeated, found.trajectories_repeated) == (1, 1, SAMPLES)


def test_a_step_is_missing(original, other):
    (other / "rollouts" / "step-000003.parquet").unlink()
    found = compare(original, other)
    assert (found.prompts_lost, found.prompts_repeated) == (PROMPTS, 0)
    assert "prompts of step 3: missing" in found.differences


def test_a_step_is_logged_twice(original, other):
    log_step(other, 3)
    found = compare(original, other)
    assert found.trajectories_repeated == PROMPTS * SAMPLES
    assert found.differences == ["metrics of step 3: differs"]


def test_a_step_is_written_in_the_place_of_the_next(original, other):
    shutil.copyfile(other / "rollouts" / "step-000002.parquet", other / "rollouts" / "step-000003.parquet")
    found = compare(original, other)
    assert (found.prompts_lost, found.prompts_repeated) == (PROMPTS, PROMPTS)
    assert found.trajectories_repeated == PROMPTS * SAMPLES


def test_another_sample(original, other):
    write_step(other, 1, [f"train.jsonl:{group}" for group in range(PROMPTS)], shift=1e-6)
    found = compare(original, other)
    assert found.differences == ["trajectories of step 1: differs"]
    assert found.trajectories_repeated == 0


def test_times_may_differ_and_losses_may_not(original, other):
    lines = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(lines.replace('"time/rollout_seconds": 0.5', '"time/rollout_seconds": 9.5'))
    assert compare(original, other).bitwise_equal
    (other / "metrics.jsonl").write_text(lines.replace('"loss": 0.5', '"loss": 0.5000000000000001'))
    assert compare(original, other).differences == ["metrics of step 2: differs"]


def test_nothing_at_all_is_lost_and_not_equal(original, tmp_path):
    found = compare(original, tmp_path)
    assert not found.bitwise_equal
    assert found.prompts_lost == STEPS * PROMPTS
    require_whole(original)
    with pytest.raises(DataError, match="nothing of it: checkpoint"):
        require_whole(tmp_path)


def test_same_is_strict():
    nan = float("nan")
    assert same({"a": [1, (nan, "x")]}, {"a": [1, (nan, "x")]})
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same(torch.tensor([nan]), torch.tensor([nan]))
    assert not same(torch.zeros(2, 1), torch.zeros(1, 2))
    assert not same(1, 1.0)
    assert not same([1], [1, 2])


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


def test_targets_in_a_process_table():
    assert by_target(RUN, driver=10) == {
        "driver": [10],
        "controller": [14],
        "trainer": [15, 16],
        "engine": [17, 21],
        "rollout_worker": [18],
        "scheduler": [19],
    }
    assert by_target([], driver=10) == {}


STEADY = [Span(phase="rollout", begin=0.0, seconds=0.8), Span(phase="train", begin=0.8, seconds=0.4)]
TIMELINE = {0: [Span(phase="start", begin=0, seconds=20)], **dict.fromkeys(range(1, 61), STEADY)}


def plan(seed, count=20, timeline=TIMELINE):
    return plan_kills(count, seed=seed, targets=USUAL, timeline=timeline)


def test_a_seed_decides_all_kills():
    assert plan(3) == plan(3)
    assert plan(3) != plan(4)


@pytest.mark.parametrize("seed", range(20))
def test_kills_are_spread_over_steps_targets_and_phases(seed):
    kills = plan(seed)
    assert sorted(kill.target for kill in kills) == sorted(USUAL * 4)
    calm = [kill for kill in kills if kill.recovery_share is None]
    assert len(calm) == 18
    assert kills[0] in calm
    steps = [kill.after_step for kill in calm]
    # two steps are what a kill takes
    assert all(after - before >= 2 for before, after in pairwise(steps))
    assert steps[0] <= 2
    assert 55 <= steps[-1] <= 60
    assert {"rollout", "train"} <= {kill.phase for kill in kills}
    for kill in kills:
        span = next(span for span in TIMELINE[kill.after_step] if span.phase == kill.phase)
        assert span.begin <= kill.offset <= span.begin + span.seconds
        assert kill.recovery_share is None or 0 <= kill.recovery_share < 1


def test_more_kills_than_steps_are_planned_all_the_same():
    assert len(plan(0, count=10, timeline={0: STEADY, 1: STEADY})) == 10
    assert plan(0, count=1, timeline={0: []})[0].phase == "start"


def beat(folder, phase, since, written=None):
    times = {"phase_since": since, "time": written or since}
    text = {name: datetime.fromtimestamp(when, UTC).isoformat() for name, when in times.items()}
    (folder / "heartbeat.json").write_text(json.dumps(text | {"phase": phase, "step": 0}))


def test_a_watch_reads_steps_and_what_is_between_them(tmp_path):
    start = time.time() - 30
    watch = Watch(tmp_path, start)
    watch.look()
    assert watch.steps_done == 0
    beat(tmp_path, "", start + 1)
    watch.look()
    beat(tmp_path, "evaluate", start + 20, start + 21)
    watch.look()
    log_step(tmp_path, 1, **{"time/step_seconds": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "eval/score": 1.0}\n{"step": 2, "half')
    watch.look()
    assert watch.steps_done == 1
    line = watch.line_times[1]
    beat(tmp_path, "export", line + 2, line + 3)
    watch.look()
    timeline = watch.timeline(line + 5)
    assert [span.phase for span in timeline[0]] == ["start", "evaluate", "rollout", "train"]
    at, evaluate, rollout, train = timeline[0]
    assert (at.begin, at.seconds) == pytest.approx((1, 19), abs=0.01)
    assert evaluate.begin == pytest.approx(20, abs=0.01)
    assert rollout.begin == pytest.approx(line - start - 1.0, abs=0.01)
    assert (train.begin, train.seconds) == pytest.approx((rollout.begin + 0.5, 0.25))
    assert [span.phase for span in timeline[1]] == ["export"]


def test_a_watch_sees_a_run_go_back(tmp_path):
    watch = Watch(tmp_path, time.time())
    for step in (1, 2, 3):
        log_step(tmp_path, step)
    watch.look()
    assert watch.steps_done == 3
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(lines[0])
    watch.look()
    assert watch.steps_done == 1


def test_a_stretch_without_anything_has_no_phases():
    assert stretch(0.0, 5.0, None, None) == []


def test_a_command_knows_its_processes_also_when_they_are_orphaned(tmp_path, monkeypatch):
    program = tmp_path / "megarl"
    # a child in a session of its own, whose parent ends: the mark alone tells whose it is
    program.write_text('#!/bin/sh\nsetsid sleep 60 &\nsetsid sleep 61 >/dev/null &\necho "$@"; exit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("benchmarks.chaos.command.END_SECONDS", 0.2)
    monkeypatch.setattr("benchmarks.chaos.command.AGENTS_END_SECONDS", 0.4)
    command = Command(["train", "x.yaml"], tmp_path / "log")
    try:
        command.start("--resume", "auto")
        deadline = time.monotonic() + 10
        while (code := command.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert code == 3
        assert command.last_words() == "train x.yaml --resume auto"
        while len(command.table()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sorted(row.title for row in command.table()) == ["sleep 60", "sleep 61"]
        command.kill(next(row.pid for row in command.table() if row.title == "sleep 60"))
        (orphan,) = [name for name in command.orphans() if name.startswith("process")]
        assert orphan.endswith("sleep 61")
    finally:
        command.end()
        command.forget()
    assert command.table() == []
    assert not command.temporary.exists()


class MadeUpCommand:
    """Ends a step every 20 ms, and none for a while after a kill; the death of `fatal` ends it with an error."""

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

    def living(self):
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

    def last_words(self):
        return "last words"


def planned(target, after_step, recovery_share=None, draw=0.0, offset=0.0):
    more = {"phase": "train", "offset": offset, "recovery_share": recovery_share}
    return PlannedKill(target=target, after_step=after_step, draw=draw, **more)


def test_a_run_is_disturbed_as_planned(tmp_path):
    command, said = MadeUpCommand(tmp_path, steps=12), []
    kills = [
        planned("engine", 2),
        planned("trainer", 5, draw=0.9),
        planned("controller", 5, 0.0),
        planned("engine", 11),
    ]
    found = Disturbance(command, tmp_path, kills, said.append).run()
    assert (found.finished, found.restarts, found.failures) == (True, 0, [])
    assert command.killed == [17, 16, 14, 21]
    assert command.started == [()]
    assert [kill.phase for kill in found.kills] == ["train", "train", "recovery", "train"]
    first, second, third, last = found.kills
    assert 2 <= first.after_step < first.recovered_by <= second.after_step
    assert third.after_step - second.after_step in (0, 1)
    assert last.recovered_by == 13
    assert all(kill.recovered and 0.2 < kill.seconds < 2 for kill in found.kills)
    assert len(said) == 8


def test_a_run_that_is_faster_than_planned_is_disturbed_all_the_same(tmp_path):
    command = MadeUpCommand(tmp_path, steps=12)
    found = Disturbance(
        command, tmp_path, [planned("engine", 0, offset=60), planned("engine", 6, offset=60)], str
    ).run()
    assert [kill.after_step for kill in found.kills] == [1, 7]


def test_a_run_that_does_not_recover_is_resumed(tmp_path):
    command = MadeUpCommand(tmp_path, steps=8, fatal=[14, 10])
    kills = [planned("controller", 2), planned("driver", 5)]
    found = Disturbance(command, tmp_path, kills, str).run()
    assert command.started == [(), ("--resume", "auto"), ("--resume", "auto")]
    assert (found.finished, found.restarts) == (True, 2)
    # the driver cannot come back by itself: whoever kills it starts it again
    assert [kill.recovered for kill in found.kills] == [False, True]
    (failure,) = found.failures
    assert failure.endswith("last words")


def test_a_run_that_cannot_be_resumed_is_given_up(tmp_path):
    command = MadeUpCommand(tmp_path, steps=8)
    command.exit_code = lambda: 1
    found = Disturbance(command, tmp_path, [planned("engine", 2)], str).run()
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
        Disturbed(kills=kills, restarts=1, failures=["gone"], finished=True, seconds=60.0),
        compare(original, other),
        orphans=orphans,
        kills_asked=3,
        steps=STEPS,
        seed=0,
        seconds_undisturbed=30.0,
    )


def test_a_report_counts(original, other, capsys):
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


def test_a_report_is_kept_as_a_table(monkeypatch, original, other, tmp_path):
    made = report(original, other)
    monkeypatch.setattr("benchmarks.chaos.__main__._run", lambda args, say: made)
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
    monkeypatch.setattr("benchmarks.chaos.__main__._run", lambda args, say: made)
    assert run(monkeypatch, "--json") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert list(json.loads(line))[:11] == FIELDS.split()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--kills=0"], "--kills needs at least 1, got 0"),
        (["--set", "tracking.rollouts=false"], "tracking.rollouts and tracking.jsonl need true"),
        (["--set", "checkpoint.every=0"], "checkpoint.every needs at least 1"),
    ],
)
def test_refusals(monkeypatch, capsys, tmp_path, args, says):
    assert run(monkeypatch, "--work", tmp_path / "work", *args) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_a_hundred_kills_of_the_demo_lose_nothing(tmp_path):
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
    assert set(found["by_target"]) == set(USUAL)
    assert found["bitwise_equal"], found["differences"]
    assert (found["prompts_lost"], found["prompts_repeated"], found["trajectories_repeated"]) == (0, 0, 0)
    assert found["orphans"] == 0, found["orphan_names"]
