"""Trains a run again on the rollouts in its journal, without engines, and saves its checkpoints once more."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.checkpoint.store import CheckpointEntry, CheckpointStore
from megarl.cluster.placement.pool import reserve_pools
from megarl.cluster.process.atomic_files import read_lines
from megarl.config import RunConfig, load_resolved
from megarl.config.placement import MAIN_POOL
from megarl.controller.actor import Controller
from megarl.controller.run_stage import rotate, run_stage
from megarl.errors import ConfigError, DataError
from megarl.rollout.journal import journal_folder, list_steps
from megarl.run.checkpointer import POLICY, Checkpointer, load_models
from megarl.run.remote.build import read_prompts, trainer_spec
from megarl.run.remote.rollout_actor import ReplayActor
from megarl.run.remote.rollout_group import RolloutGroup
from megarl.run.remote.rollout_workers import RolloutWorkers
from megarl.run.remote.trainer_group import AuxiliaryModels, make_rank_processes, make_trainer_group
from megarl.run.rl_run import RLRun
from megarl.run.run_logs import last_logged_step, logged_batches
from megarl.run.run_parts import RunParts
from megarl.run.run_state import RunState
from megarl.run.schedule.events import LogMismatchError, ScheduleState
from megarl.run.schedule.schedule import place
from megarl.run.step_limits import SKIPPED_METRICS
from megarl.run.supervision.restart_budget import RestartBudget
from megarl.run.sync.weight_sync import WeightSync
from megarl.tracking.progress import EventLog, MessageEvent
from megarl.tracking.timing import PhaseTimer, Startup
from megarl.tracking.tracker import METRICS_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Result of a replay."""

    begun_at: int
    """Step of the checkpoint from which it began; 0: the beginning of the run."""
    last_step: int
    checkpoints: Mapping[int, list[str]]
    """By step of each checkpoint that both have, the names of the values that differ in any bit."""
    seconds: Mapping[str, float]
    """`total`, without the start of the processes, and by phase."""
    first_difference: int | None = None
    """First step whose loss, gradient norm or number of updates differs; None: none, or `tracking.jsonl` is off."""

    @property
    def training_share(self) -> float:
        """Share of `seconds["total"]` in which models compute or are moved."""
        return sum(self.seconds.get(name, 0.0) for name in TRAINING_PHASES) / self.seconds["total"]

    @property
    def line(self) -> str:
        """One line about what was replayed."""
        return (
            f"replayed steps {self.begun_at + 1} to {self.last_step} in {self.seconds['total']:.1f} s, "
            f"{self.training_share:.1%} of it training"
        )


COMPARED_METRICS = ("loss", "grad_norm", "updates", *SKIPPED_METRICS)
"""Metrics that tell whether a step was trained alike."""

TRAINING_PHASES = ("train", "train_critic", "logprobs", "reference", "values", "score", "onload", "offload")
"""Phases in which models compute or are moved."""


def replay_run(run_dir: Path, out: Path) -> ReplayReport:
    """Train the run in `run_dir` again on its journal, from its oldest checkpoint whose journal is whole.

    Args:
        out: folder of the replay; one that exists is renamed.

    Raises:
        ConfigError: there is no run in the folder.
        DataError: no checkpoint has a journal that is whole.
    """
    file = run_dir / "train.yaml"
    if not file.is_file():
        raise ConfigError(f"{run_dir} is not the folder of a run of megarl train: {file.name} is missing")
    config = load_resolved(file)
    assert isinstance(config, RunConfig)
    begin, last_step = _find_range(config, run_dir)
    if out.exists():
        rotate(out)
    out.mkdir(parents=True)
    (out / "journal").symlink_to(os.path.relpath(journal_folder(run_dir), out))
    keep = config.checkpoint.model_copy(update={"keep_journal": "all", "keep_last": last_step or 1})
    config = config.model_copy(
        update={
            "run_dir": str(out),
            "export_dir": None,
            "checkpoint": keep,
            "tracking": config.tracking.model_copy(update={"rollouts": False}),
        }
    )
    resume = None if begin is None else begin.folder
    seconds = run_stage(config, Controller.replay, begins_run=False, extra_arguments=(resume, last_step))
    return ReplayReport(
        begun_at=0 if begin is None else begin.step,
        last_step=last_step,
        checkpoints=_compare(run_dir, out),
        first_difference=first_difference(run_dir / METRICS_FILE, out / METRICS_FILE),
        seconds=seconds,
    )


def _find_range(config: RunConfig, run_dir: Path) -> tuple[CheckpointEntry | None, int]:
    """Return the checkpoint to begin from, None for step 0, and the last step in the journal."""
    entries, is_sync = CheckpointStore(run_dir).entries(), config.schedule.type == "sync"
    steps = set(list_steps(run_dir))
    newest = max((entry.step for entry in entries), default=0)
    last_step = min(max(steps, default=0), newest) if is_sync else last_logged_step(run_dir)
    for entry in (None, *entries):
        begin = 0 if entry is None else entry.step
        if is_sync:
            needed = set(range(begin + 1, last_step + 1))
        else:
            needed = _needed_steps(config, ScheduleState() if entry is None else _schedule(entry), last_step)
        if begin < last_step and needed and needed <= steps:
            return entry, last_step
    raise DataError(
        f"the journal of {run_dir} does not reach from a checkpoint to a later step; with checkpoint.keep_journal: all "
        "it has every step"
    )


def _needed_steps(config: RunConfig, state: ScheduleState, last_step: int) -> set[int]:
    """Return the steps of the journal that the batches after `state` need; none if the log does not continue it."""
    try:
        logged = logged_batches(Path(config.run_dir), state)
    except LogMismatchError:
        return set()
    batches = [lease for lease in logged.leases if lease.step <= last_step]
    return {place(ordinal, config.algorithm.prompts_per_step)[0] for lease in batches for ordinal in lease.ordinals}


def _schedule(entry: CheckpointEntry) -> ScheduleState:
    return RunState.read(entry.folder).schedule or ScheduleState()


def first_difference(file: Path, other: Path) -> int | None:
    """Return the first step that two files of metrics both have, and whose training differs; None: there is none."""
    rows, others = _training_rows(file), _training_rows(other)
    return next((step for step in sorted(rows.keys() & others.keys()) if rows[step] != others[step]), None)


def _training_rows(file: Path) -> dict[int, dict[str, object]]:
    """Return by step what its training has logged, apart from times."""
    if not file.is_file():
        return {}
    rows = [row for row in read_lines(file)[0] if "tokens_per_second" in row]
    return {row["step"]: {name: row[name] for name in row if name in COMPARED_METRICS} for row in rows}


def _compare(run_dir: Path, out: Path) -> dict[int, list[str]]:
    from megarl.checkpoint.compare import differing_values  # imports torch

    replayed = {entry.step: entry.folder for entry in CheckpointStore(out).entries()}
    return {
        entry.step: differing_values(entry.folder, replayed[entry.step])
        for entry in CheckpointStore(run_dir).entries()
        if entry.step in replayed
    }


def replay_journal(
    config: RunConfig, events: EventLog, closing: ExitStack, startup: Startup, *, resume: Path | None, last_step: int
) -> dict[str, float]:
    """Train up to `last_step`; return the seconds of the replay, in all and by phase.

    Args:
        config: of the run, with a folder whose `journal` is that of the run.
        closing: receives the shutdown callbacks of the rollout workers.
        resume: checkpoint to begin from; None: the model folders.

    Raises:
        WorkerError: the journal lacks a group.
    """
    from megarl.algorithms import find_algorithm

    def notify(text: str) -> None:
        events.add(MessageEvent(text))

    pools = reserve_pools(config.placement, config.placement.all_pools)
    processes = make_rank_processes(pools[MAIN_POOL], "trainer")
    trainer, load_weights = make_trainer_group(config, processes), resume is None
    workers = RolloutWorkers(config, None, RestartBudget(config.recovery, notify), ReplayActor)
    # a batch is read at once: in one call, it has arrived before the step that needs it
    rollout = RolloutGroup(config, None, workers, max_per_object=config.algorithm.prompts_per_step)
    closing.callback(rollout.shutdown)
    algorithm = find_algorithm(config.algorithm.type)
    for actor in rollout.actors().values():  # otherwise it would import estimators and torch in the first step
        actor.preimport.remote(algorithm, time.time())
    models, starting = AuxiliaryModels.start(config, processes, pools, load_weights=load_weights)
    starting.append(trainer.start_workers(trainer_spec(config, load_weights=load_weights)))
    prompts = replace(read_prompts(config, Path(config.run_dir)), held_out=())
    rollout.start()
    for pending in starting:
        pending.result(config.placement.start_timeout_seconds)
    trained = {POLICY: trainer, **models.trained}
    state = RunState()
    if resume is not None:
        state = RunState.read(resume)
        load_models(resume, trained, notify)
    parts = RunParts(
        trainer=trainer,
        models=models,
        rollout=rollout,
        sync=WeightSync(None),
        prompts=prompts,
        dtype=config.model.resolved_dtype(pools[MAIN_POOL].device),
        checkpoints=Checkpointer(config, trained, notify) if config.checkpoint.every else None,
        resumed=state,
        replay_until=last_step,
    )
    run = RLRun(config, events, PhaseTimer(), startup, parts)
    begin = time.perf_counter()
    algorithm().train(run, config.algorithm)
    run.save()
    seconds = {"total": time.perf_counter() - begin, **run.totals.snapshot(run.timer).seconds_by_phase}
    run.finish()
    return dict(seconds)
