"""Recovery of a run whose processes die: restart them and repeat the steps since the last checkpoint.

- Engines and rollout workers are replaced within a step (`megarl.run.supervision`).
- If a trainer rank dies, the others hang in collectives. All trainer ranks are restarted from the newest checkpoint.
  The steps after it are trained again on the rollouts in the run's journal, which gives the same weights.
- If the controller's actor dies, Ray restarts it. It then restarts all processes from the newest checkpoint.

Only lost processes are restarted: those that have died, those that did not answer within a timeout, and those that NCCL
lost contact with. Any other error, such as an exception in a rank or in a reward function, ends the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.checkpoint.run_lock import require_lock
from megarl.checkpoint.store import CheckpointStore
from megarl.cluster.workers.failures import pause
from megarl.config import RunConfig
from megarl.controller.assembly import RunAssembly
from megarl.controller.resume import latest_valid
from megarl.errors import (
    HungWorkerError,
    LostEngineError,
    LostRankError,
    LostWorkerError,
    MegarlError,
    RestartLimitError,
    WeightSyncError,
    WorkerError,
)
from megarl.rollout.journal.journal import journal_folder, list_steps, remove_steps_from
from megarl.run.run_events import EventLog, MessageEvent
from megarl.run.schedule.events import ScheduleState
from megarl.run.schedule_log import continues_log, log_folder
from megarl.run.supervision.restart_budget import RESTARTS_FILE, RestartBudget, RestartLog
from megarl.run.supervision.run_monitor import RunMonitor
from megarl.run.update_log import update_folder
from megarl.tracking.startup import Startup

if TYPE_CHECKING:
    from megarl.run.rl_run import RLRun


def train_with_recovery(
    config: RunConfig, events: EventLog, closing: ExitStack, startup: Startup, *, resume: Path | None, restarted: bool
) -> RLRun:
    """Train and export, restarting lost processes, and return the finished run.

    Args:
        closing: receives the shutdown callbacks of what must end gracefully.
        resume: checkpoint folder to resume from; None: start from step 0.
        restarted: Ray has restarted the controller: resume from the run's newest valid checkpoint, if there is one.

    Raises:
        MegarlError: an error that no lost process explains, or the restart budget is spent.
    """

    def notify(text: str) -> None:
        events.add(MessageEvent(text))

    def newest_checkpoint() -> Path | None:
        saved = latest_valid(config, notify)
        return saved.folder if saved is not None else resume

    restart_budget = _open_restart_budget(config, notify, restarted=restarted)
    monitor = RunMonitor(config, notify)
    closing.push(monitor.close)
    assembly = RunAssembly(config, events, closing, startup, restart_budget=restart_budget, monitor=monitor)
    checkpoint = newest_checkpoint() if restarted else resume
    while True:
        if checkpoint is None and restarted:
            discard_partial_journal(config)
        run: RLRun | None = None
        try:
            with monitor.start(restart_budget.step):
                run = assembly.assemble(checkpoint, restarted=restarted)
            monitor.heartbeat.status("running")
            train(run)
            run.save()
            run.export(run.trainer)
            run.finish()
        except RestartLimitError:
            raise
        except (WorkerError, WeightSyncError) as error:
            loss = _find_loss(error, assembly, is_first_start=run is None and not restarted)
            if loss is None:
                raise
            seconds = restart_budget.spend("trainer", loss, run.step if run is not None else 0)
        else:
            return run
        monitor.heartbeat.status("recovering")
        assembly.stop_trainer()
        if run is not None:
            run.abort()
        pause(seconds)
        assembly.replace_nodes()
        checkpoint, restarted = newest_checkpoint(), True


def _open_restart_budget(config: RunConfig, notify: Callable[[str], None], *, restarted: bool) -> RestartBudget:
    """Return the budget of the command, of which a restarted controller spends one restart for itself.

    Raises:
        RestartLimitError: the controller was lost too often.
    """
    log = RestartLog(Path(config.run_dir) / RESTARTS_FILE, partial(require_lock, config.run_dir))
    if not restarted:
        log.begin()
        return RestartBudget(config.recovery, notify, log)
    # the steps after the newest checkpoint are repeated: only another checkpoint is progress
    saved = [entry.step for entry in CheckpointStore(config.run_dir).entries()]
    restart_budget = RestartBudget(config.recovery, notify, log, last_step=max(saved, default=0))
    pause(restart_budget.spend("controller", LostWorkerError("its process has ended"), restart_budget.step))
    return restart_budget


def discard_partial_journal(config: RunConfig) -> None:
    """Remove the groups of a run that starts over from step 0 and does not have those of its first steps any more.

    The weights that sampled them will not be those of the same step this time.
    """
    run_dir, steps = config.run_dir, [step for step in list_steps(config.run_dir) if step > 0]
    is_whole = steps[:1] in ([], [1]) if config.schedule.type == "sync" else continues_log(config, ScheduleState())
    if is_whole:
        return
    remove_steps_from(run_dir, 1)
    for folder in (log_folder(journal_folder(run_dir)), update_folder(journal_folder(run_dir))):
        shutil.rmtree(folder, ignore_errors=True)


def _find_loss(error: MegarlError, assembly: RunAssembly, *, is_first_start: bool) -> MegarlError | None:
    """Return the loss of a process that is, or explains, `error`; None: no process was lost.

    Args:
        is_first_start: the processes have never worked together: only a death counts, because a timeout or a lost
            connection then more likely comes from the configuration, which a restart does not change.
    """
    loss = error if isinstance(error, LostWorkerError | LostEngineError) else assembly.find_lost_process(error)
    if loss is None and isinstance(error, HungWorkerError | LostRankError):
        loss = error
    return None if is_first_start and not isinstance(loss, LostWorkerError | LostEngineError) else loss


def train(run: RLRun) -> None:
    """Run the training loop of the configured algorithm, imported here because the loops import torch."""
    from megarl.algorithms.registry import train as train_algorithm

    train_algorithm(run)
