"""A run goes on where its processes die: what can be made anew is, and steps since the last checkpoint are done again.

Engines and rollout workers are replaced within a step. A trainer rank takes all others with it, since they wait for it
in collectives: all are started anew from the newest checkpoint, and the steps behind it are trained again on the
rollouts in the run's journal, to the same weights. The controller's own actor is restarted by Ray, and then does the
same with everything.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from megarl.algorithms.registry import train
from megarl.config import RunConfig
from megarl.controller.assembly import Fleet
from megarl.controller.resume import newest_whole
from megarl.errors import GivenUpError, LostEngineError, LostWorkerError, WeightSyncError, WorkerError
from megarl.run.events import EventLog, Note
from megarl.run.rl_run import PolicyRun
from megarl.supervision.restart_budget import Restarts
from megarl.supervision.run_monitor import Vigil
from megarl.tracking.startup import Startup


def train_through(
    config: RunConfig, events: EventLog, closing: ExitStack, startup: Startup, *, resume: Path | None, again: bool
) -> PolicyRun:
    """Train to the end, whatever dies on the way; the run that came to it, its books closed.

    Args:
        closing: ends what must end in order.
        resume: the checkpoint to go on from.
        again: the controller has died and been restarted: go on from the newest checkpoint.

    Raises:
        MegarlError: what cannot be mended by starting processes anew, or has been too often.
    """

    def say(text: str) -> None:
        events.add(Note(text))

    def newest() -> Path | None:
        saved = newest_whole(config, say)
        return saved.folder if saved is not None else resume

    restarts = Restarts(config.recovery, say)
    if again:
        say("the controller was lost; everything is started anew")
    vigil = Vigil(config, say)
    closing.push(vigil.ended)
    fleet = Fleet(config, events, closing, startup, restarts=restarts, vigil=vigil)
    start = newest() if again else resume
    while True:
        run: PolicyRun | None = None
        try:
            with vigil.start(restarts.step):
                run = fleet.assemble(start, again=again)
            vigil.heartbeat.status("running")
            train(run)
            run.save()
            run.export(run.trainer)
            run.finish()
        except GivenUpError:
            raise
        except (WorkerError, WeightSyncError) as error:
            if run is None and not again and not isinstance(error, LostWorkerError | LostEngineError):
                raise  # what cannot be built now cannot be built in a second either
            seconds = restarts.take("trainer", error, run.step if run is not None else 0)
        else:
            return run
        vigil.heartbeat.status("recovering")
        fleet.end_trainer()
        if run is not None:
            run.give_up()
        time.sleep(seconds)
        fleet.replace_nodes()
        start, again = newest(), True
