"""Reports of runs that were not made, for the benchmarks that take minutes, and steps of fake runs."""

import json
from pathlib import Path

from benchmarks.async_agents.run import ScheduleReport, read_report
from benchmarks.chaos.compare import Comparison
from benchmarks.chaos.disturb import InjectionResult, Kill
from benchmarks.chaos.report import ChaosReport, make_report
from benchmarks.end_to_end.timed_run import TimedRun
from benchmarks.mismatch.measure import MismatchReport
from benchmarks.startup.measure import KINDS, Start


def chaos_report(*, orphans: tuple[str, ...] = ()) -> ChaosReport:
    """Return the report of three kills, of which the run has recovered from two."""
    kills = [
        Kill(target=target, pid=1, phase=phase, after_step=1, when=0.0, recovered_by=3, recovered=True, seconds=seconds)
        for target, phase, seconds in [("engine", "train", 4.0), ("engine", "rollout", 9.0)]
    ]
    kills.append(Kill(target="trainer", pid=3, phase="train", after_step=7, when=0.0, recovered_by=9))
    counts = {"prompts_lost": 0, "prompts_repeated": 0, "trajectories_repeated": 0}
    return make_report(
        InjectionResult(kills=kills, restarts=1, failures=["gone"], finished=True, seconds=60.0),
        Comparison(bitwise_equal=True, differences=[], **counts),
        orphans=orphans,
        kills_asked=3,
        steps=4,
        seed=0,
        seconds_undisturbed=30.0,
    )


def schedule_report(schedule: str, step_seconds: float, held_out: float) -> ScheduleReport:
    """Return the report of ten steps with a schedule."""
    times = {"time/step_seconds": step_seconds, "time/rollout_seconds": step_seconds / 2, "time/train_seconds": 0.25}
    staleness = {"staleness/mean": 2.0} if schedule == "async" else {}
    steps = [{"step": step, "reward/mean": step / 10} | times | staleness for step in range(1, 11)]
    rows = [{"step": 0, "eval/game": 0.0}, *steps, {"step": 10, "eval/game": held_out}]
    return read_report(schedule, rows, held_out=held_out, own={"trainer": 0.3, "scheduler": 0.2}, machine=0.75)


def timed_run(seconds: float) -> TimedRun:
    """Return a run of three steps, of which the median took `seconds`."""
    return TimedRun(
        seconds=(seconds, seconds, 100.0),
        lengths=tuple(range(1, 101)),
        phases={"rollout": seconds / 2},
        processor_seconds={"trainer": seconds / 4},
    )


def mismatch_report(name: str, kl: list[float], **fields: object) -> MismatchReport:
    """Return the report of a run with a mismatch in each step; without values, of a run without engines."""
    mismatch = {"logprob_kl": kl, "logprob_abs_p99": [0.01] * len(kl), "logprob_abs_max": [0.1] * len(kl)}
    given = {"difference": "", "entropy": [0.5, 1.0], "stopped_by": "", "mismatch": mismatch if kl else {}} | fields
    return MismatchReport(name=name, dtype="bfloat16", steps=len(kl), **given)  # type: ignore[arg-type]


def start(seconds: float, **phases: float) -> Start:
    """Return a start whose time is imports but for 1 s."""
    kinds = {"imports": seconds - 1, "ray": 1.0}
    return Start(seconds=seconds, by_kind=kinds, phases=phases, cpu_seconds=dict.fromkeys(KINDS, 1.0))


def log_step(folder: Path, step: int, **metrics: float) -> None:
    """Append the line of a step of 1 s to `metrics.jsonl`."""
    line = {"step": step, "loss": 1 / step, "reward/mean": 0.1 * step, "time/rollout_seconds": 0.5}
    times = {"time/train_seconds": 0.25, "time/step_seconds": 1.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line | times | metrics) + "\n")
