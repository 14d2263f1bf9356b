"""Recovery of a run whose processes die: restart them and repeat the steps since the last checkpoint.

- Engines and rollout workers are replaced within a step (`megarl.supervision`).
- If a trainer rank dies, the others hang in collectives. All trainer ranks are restarted from the newest checkpoint.
  The steps after it are trained again on the rollouts in the run's journal, which gives the same weights.
- If the controller's actor dies, Ray restarts it. It then restarts all processes from the newest checkpoint.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from megarl.algorithms.registry import train
from megarl.config import RunConfig
from megarl.controller.assembly import RunAssembly
from megarl.controller.resume import latest_valid
from megarl.errors import LostEngineError, LostWorkerError, RestartLimitError, WeightSyncError, WorkerError
from megarl.run.events import EventLog, MessageEvent
from megarl.run.rl_run import RLRun
from megarl.supervision.restart_budget import RestartBudget
from megarl.supervision.run_monitor import RunMonitor
from megarl.tracking.startup import Startup


def train_with_recovery(
    config: RunConfig, events: EventLog, closing: ExitStack, startup: Startup, *, resume: Path | None, restarted: bool
) -> RLRun:
    """Train and export, restarting lost processes, and return the finished run.

    Args:
        closing: receives the shutdown callbacks of what must end gracefully.
        resume: checkpoint folder to resume from; None: start from step 0.
        restarted: Ray has restarted the controller: resume from the run's newest valid checkpoint, if there is one.

    Raises:
        MegarlError: a failure that a restart cannot fix, or the restart budget is spent.
    """

    def notify(text: str) -> None:
        events.add(MessageEvent(text))

    def newest_checkpoint() -> Path | None:
        saved = latest_valid(config, notify)
        return saved.folder if saved is not None else resume

    restart_budget = RestartBudget(config.recovery, notify)
    if restarted:
        notify("the controller was lost; restarting all processes")
    monitor = RunMonitor(config, notify)
    closing.push(monitor.close)
    assembly = RunAssembly(config, events, closing, startup, restart_budget=restart_budget, monitor=monitor)
    checkpoint = newest_checkpoint() if restarted else resume
    while True:
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
            if run is None and not restarted and not isinstance(error, LostWorkerError | LostEngineError):
                raise  # not a lost process: building it again would fail in the same way
            seconds = restart_budget.spend("trainer", error, run.step if run is not None else 0)
        else:
            return run
        monitor.heartbeat.status("recovering")
        assembly.stop_trainer()
        if run is not None:
            run.abort()
        time.sleep(seconds)
        assembly.replace_nodes()
        checkpoint, restarted = newest_checkpoint(), True
