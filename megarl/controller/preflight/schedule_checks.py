"""Checks of the section `schedule` against the other sections."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from megarl.config import RunConfig
from megarl.config.algorithm import DapoConfig, PrimeConfig
from megarl.run.schedule.settings import SchedulePolicy, TailStats
from megarl.tracking.tracker import METRICS_FILE

OBSERVED_STEPS = 32
"""Number of the last run's last steps that the needed lookahead and cap are estimated from."""

MIN_OBSERVED_STEPS = 4
"""With fewer steps, nothing is estimated: the first ones contain the start of the engines."""


def find_schedule_problems(config: RunConfig, device: str | None) -> Iterator[str]:
    """Yield a sentence for each setting with which the schedule cannot work.

    Args:
        device: of the engines, `cpu` or `cuda`; None: unknown.
    """
    schedule = config.schedule.resolved()
    if schedule.type == "sync":
        return
    yield from config.schedule.engine_problems(config.rollout.engine)
    releases_memory = device is not None and config.releases_engine_memory(device)
    if schedule.update == "in_place" and releases_memory:
        yield (
            "schedule.update: in_place keeps the KV cache of running requests, but engines that share the trainer's "
            "devices release it: give them a pool of their own (placement.rollout.pool), set "
            "rollout.engine.release_memory: false, or use update: retract"
        )
    if schedule.update == "drain" and releases_memory:
        yield (
            "schedule.update: drain waits for requests after the training of a step, when engines that share the "
            "trainer's devices have released their memory: give them a pool of their own (placement.rollout.pool), set "
            "rollout.engine.release_memory: false, or use schedule.type: async with update: retract"
        )
    if isinstance(config.algorithm, DapoConfig | PrimeConfig) and (models := sorted(config.reward.models)):
        yield (
            f"schedule.type: {schedule.type} filters groups by rules as they finish, but reward.terms.{models[0]} is a "
            f"model, which scores whole batches: {config.algorithm.type} needs rules only, or schedule.type: sync"
        )


def find_journal_notices(config: RunConfig) -> Iterator[str]:
    """Yield what a run without checkpoints keeps of its rollouts."""
    if config.checkpoint.every:
        return
    if config.checkpoint.keep_journal == "needed":
        yield (
            "checkpoint.every: 0 writes no checkpoints: a run that is interrupted, or loses its trainer, starts over "
            "from step 0, and samples all steps again; with checkpoint.keep_journal: all it trains them on its journal"
        )
    else:
        yield (
            "checkpoint.every: 0 with checkpoint.keep_journal: all: nothing is ever removed from the journal, 8 bytes "
            "a token, and a run that is interrupted, or loses its trainer, trains again on all of it"
        )


def find_schedule_notices(config: RunConfig) -> Iterator[str]:
    """Yield what the last run in `run_dir` says about the lookahead and cap that a run needs, and unbounded weights."""
    decoupled = getattr(config.algorithm, "decoupled", None)
    if config.schedule.type != "sync" and decoupled is not None and decoupled.behave_cap is None:
        yield (
            "algorithm.decoupled.behave_cap: null does not bound the weights of samples of older policies, one of "
            "which may dominate a step; 2 is the bound of rollout_is"
        )
    tail = _read_tail(Path(config.run_dir) / METRICS_FILE)
    if tail is None:
        return
    yield f"the last run in {config.run_dir}: {tail.line}"
    if config.schedule.type != "sync":
        yield from tail.warnings(SchedulePolicy.of(config.schedule))


def _read_tail(file: Path) -> TailStats | None:
    """Return how long groups took in the last steps of a run; None if there are too few."""
    if not file.is_file():
        return None
    lines = file.read_text().split("\n")[:-1][-2 * OBSERVED_STEPS :]
    rows = [row for row in map(json.loads, lines) if "rollout/generation_seconds_mean" in row and "loss" in row]
    rows = [row for row in rows if row["step"] > 1][-OBSERVED_STEPS:]
    if len(rows) < MIN_OBSERVED_STEPS:
        return None
    generation = fmean(row["rollout/generation_seconds_mean"] for row in rows)
    training = fmean(map(_training_seconds, rows))
    return TailStats(
        mean_steps=generation / (step := _step_seconds(rows, generation, training)),
        max_steps=max(row["rollout/generation_seconds_max"] for row in rows) / step,
        train_steps=training / step,
    )


def _training_seconds(row: Mapping[str, float]) -> float:
    """Return the seconds of a step without those in which it waits for groups."""
    waiting = sum(row.get(f"time/{phase}_seconds", 0.0) for phase in ("rollout", "drain", "evaluate"))
    return row["time/step_seconds"] - waiting


def _step_seconds(rows: Sequence[Mapping[str, float]], generation: float, training: float) -> float:
    """Return the duration of an asynchronous step: as measured, or estimated from a synchronous run.

    Where the engines hold a whole batch at once, they are busy for the mean duration of its groups.
    """
    if "schedule/unfinished" in rows[-1]:
        return median(row["time/step_seconds"] for row in rows)
    return max(generation, training)
