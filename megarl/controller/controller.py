"""The controller actor: runs a stage as plain Python, and answers the driver's questions meanwhile."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import ray

from megarl import IMPORTED_SINCE
from megarl.config import DpoConfig, RmConfig, RunConfig, SftConfig
from megarl.controller.build import build_evaluation, stage_processes
from megarl.controller.evaluation import greedy_score
from megarl.controller.events import Event, EventLog, Note
from megarl.controller.recovery import train_through
from megarl.controller.stages import make_dpo, make_rm, make_sft
from megarl.tracking.startup import Startup


class Controller:
    """Hosted by a Ray actor with two threads: one runs the stage, one answers `events`, `finish_early` and `stop`."""

    def __init__(self, startup: Startup, asked: float) -> None:
        """`startup`: of the command; `asked`: when Ray was asked for this process, in Unix time."""
        startup.add("controller", "ray", [(asked, IMPORTED_SINCE)])
        startup.add("controller", "imports", [(IMPORTED_SINCE, time.time())])
        self._startup = startup
        self._events = EventLog()
        self._closing = ExitStack()

    def events(self, cursor: int) -> tuple[list[Event], int]:
        """What happened since `cursor`, and the next cursor."""
        return self._events.since(cursor)

    def finish_early(self, asked_by: str) -> None:
        """Have the stage end after the step under way: it raises StoppedEarly, its model written and books closed."""
        self._events.finish_early(asked_by)

    def stop(self) -> None:
        """End the processes that leave files behind where they are killed; a stage under way fails."""
        self._closing.close()

    def train(self, config: RunConfig, resume: Path | None = None) -> None:
        """Reinforcement learning from start to export; from the checkpoint `resume`, where there is one.

        Ray calls it again where it had to restart this actor.
        """
        self._events.add(Note("starting trainer ranks and rollout engines"))
        again = ray.get_runtime_context().was_current_actor_reconstructed
        with self._closing:
            run = train_through(config, self._events, self._closing, self._startup, resume=resume, again=again)
        run.require_whole()

    def sft(self, config: SftConfig) -> None:
        """Supervised fine-tuning from start to export."""
        self._events.add(Note("starting trainer ranks"))
        run = make_sft(config, self._events, stage_processes(config))
        run.train()
        run.require_whole()

    def rm(self, config: RmConfig) -> None:
        """A reward or cost model from pairs, from start to export."""
        self._events.add(Note("starting trainer ranks"))
        run = make_rm(config, self._events, stage_processes(config))
        run.train()
        run.require_whole()

    def dpo(self, config: DpoConfig) -> None:
        """Direct preference optimisation from start to export."""
        self._events.add(Note("starting trainer ranks"))
        run = make_dpo(config, self._events, stage_processes(config))
        run.train()
        run.require_whole()

    def evaluate(self, config: RunConfig) -> float:
        """The held-out score of the model as it is."""
        self._events.add(Note("starting rollout engines"))
        with self._closing:
            rollout, held_out = build_evaluation(config, self._closing)
            return greedy_score(config, rollout, held_out, label="evaluate")
