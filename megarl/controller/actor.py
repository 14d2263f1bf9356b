"""The controller actor: runs a stage as plain Python, and answers the driver's questions meanwhile."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import ray

from megarl import IMPORTED_SINCE
from megarl.checkpoint.run_lock import RunLock
from megarl.config import DpoConfig, RmConfig, RunConfig, SftConfig
from megarl.controller.detached import waited_for
from megarl.controller.recovery import train_through
from megarl.errors import MegarlError, WorkerError
from megarl.groups.build import build_evaluation, stage_processes
from megarl.run.evaluation import greedy_score
from megarl.run.events import Event, EventLog, Note
from megarl.stages.build_stages import make_dpo, make_rm, make_sft
from megarl.tracking.startup import Startup

LINGER_SECONDS = 60.0
"""How long a run that belongs to its cluster can be asked how it ended."""

TELL_SECONDS = 2.0
"""How long an answer may take to its asker."""


class Controller:
    """Hosted by a Ray actor with three threads: one runs the stage, others answer `events` and so on meanwhile."""

    def __init__(self, startup: Startup, asked: float, alone: tuple[RunConfig, Path | None] | None = None) -> None:
        """Args:
        startup: of the command.
        asked: when Ray was asked for this process, in Unix time.
        alone: what to `train` without being called, now and wherever Ray has restarted this actor.
        """
        startup.add("controller", "ray", [(asked, IMPORTED_SINCE)])
        startup.add("controller", "imports", [(IMPORTED_SINCE, time.time())])
        self._startup = startup
        self._events = EventLog()
        self._closing = ExitStack()
        self._alone: threading.Thread | None = None
        self._failure: MegarlError | None = WorkerError("the run ended by an error that the controller's log has")
        self._has_told = threading.Event()
        if alone is not None:
            self._alone = threading.Thread(target=self._train_alone, args=alone, name="train")
            self._alone.start()

    def events(self, cursor: int) -> tuple[list[Event], int]:
        """What happened since `cursor`, and the next cursor."""
        return self._events.since(cursor)

    def finish_early(self, asked_by: str) -> None:
        """Have the stage end after the step under way: it raises StoppedEarly, its model written and books closed."""
        self._events.finish_early(asked_by)

    def has_ended(self) -> bool:
        """Whether a run has that nobody has called."""
        assert self._alone is not None, "its caller knows"
        return not self._alone.is_alive()

    def outcome(self) -> None:
        """Wait for the end of a run that nobody has called; raises what has ended it."""
        assert self._alone is not None, "its caller knows"
        self._alone.join()
        self._has_told.set()
        if self._failure is not None:
            raise self._failure

    def _train_alone(self, config: RunConfig, resume: Path | None) -> None:
        try:
            with waited_for(RunLock(config.run_dir)):
                self.train(config, resume)
            self._failure = None
        except MegarlError as error:
            self._failure = error
        finally:
            threading.Thread(target=self._end, name="end", daemon=True).start()

    def _end(self) -> None:
        """Leave the cluster, once somebody was told how the run ended, or nobody asks."""
        self._has_told.wait(LINGER_SECONDS)
        time.sleep(TELL_SECONDS)
        ray.kill(ray.get_runtime_context().current_actor)

    def stop(self) -> None:
        """End the processes that leave files behind where they are killed; a stage under way fails."""
        with suppress(KeyboardInterrupt), self._closing:
            raise KeyboardInterrupt  # so that a run's last sign of life is not that of one which came to its end

    def train(self, config: RunConfig, resume: Path | None = None) -> None:
        """Reinforcement learning from start to export; from the checkpoint `resume`, where there is one.

        Ray calls it again where it had to restart this actor.
        """
        self._events.add(Note("starting trainer ranks and rollout engines"))
        again = ray.get_runtime_context().was_current_actor_reconstructed
        with self._closing:
            run = train_through(config, self._events, self._closing, self._startup, resume=resume, again=again)
        run.require_whole()

    def sft(self, config: SftConfig, resume: Path | None = None) -> None:
        """Supervised fine-tuning from start to export; from the checkpoint `resume`, where there is one."""
        self._events.add(Note("starting trainer ranks"))
        run = make_sft(config, self._events, stage_processes(config), resume)
        run.train()
        run.require_whole()

    def rm(self, config: RmConfig, resume: Path | None = None) -> None:
        """A reward or cost model from pairs, as `sft`."""
        self._events.add(Note("starting trainer ranks"))
        run = make_rm(config, self._events, stage_processes(config), resume)
        run.train()
        run.require_whole()

    def dpo(self, config: DpoConfig, resume: Path | None = None) -> None:
        """Direct preference optimisation, as `sft`."""
        self._events.add(Note("starting trainer ranks"))
        run = make_dpo(config, self._events, stage_processes(config), resume)
        run.train()
        run.require_whole()

    def evaluate(self, config: RunConfig) -> float:
        """The held-out score of the model as it is."""
        self._events.add(Note("starting rollout engines"))
        with self._closing:
            rollout, held_out = build_evaluation(config, self._closing)
            return greedy_score(config, rollout, held_out, label="evaluate")
