"""A training stage in the processes of torchrun, without Ray: every rank runs the stage's loop and its own worker.

torchrun ---> rank 0: loop -> SpmdGroup -> worker    shows the progress, writes metrics, keeps the run's folder
         `--> rank 1: loop -> SpmdGroup -> worker    silent, unless it is the first that fails
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol, TypeVar

from megarl.config import StageConfig
from megarl.config.tracking import TrackingConfig
from megarl.controller.run_stage import STOP_SECONDS, begin_run, require_sound, show
from megarl.controller.torchrun_ranks import joined_ranks
from megarl.errors import StoppedEarly
from megarl.process import early_stop_signal
from megarl.process.torchrun_env import TorchrunWorld
from megarl.run.events import Event, EventLog, Note
from megarl.tracking.progress import RunProgress
from megarl.workers.group import Processes
from megarl.workers.spmd import SpmdWorld

C = TypeVar("C", bound=StageConfig)

NOTHING = TrackingConfig(tensorboard=False, jsonl=False, rollouts=False)


class Stage(Protocol):
    """The loop of a training stage, as `megarl.stages.sft.SftRun` is."""

    def train(self) -> None:
        """From the first step to the export."""
        ...

    def require_whole(self) -> None:
        """Return if that was not cut short.

        Raises:
            StoppedEarly: it was, on every rank.
        """
        ...


def run_spmd_stage(
    config: C,
    make: Callable[[C, EventLog, Processes, Path | None], Stage],
    world: TorchrunWorld,
    *,
    name: str,
    resume: str | None = None,
) -> None:
    """Run a stage on the ranks of `world`, which has one for every slot, this process being one.

    Args:
        make: builds the stage's models in the processes that it is given, and its loop over them, which goes on from
            a checkpoint where that is given.
        name: what the resolved configuration is called in the run's folder.
        resume: which run to go on with: see `megarl.controller.resume`; None: a new one begins.

    Raises:
        MegarlError: what ended the run, on the rank that speaks for all; the others exit with their code.
    """
    with joined_ranks(config.placement, world) as ranks, ExitStack() as closing:
        config, checkpoint = ranks.on_first(lambda: _prepared(config, name, resume, closing))
        if world.rank != 0:
            config = config.model_copy(update={"tracking": NOTHING})
        with RunProgress(config.trainer.steps) if world.rank == 0 else nullcontext() as progress:
            events = _Shown(progress, ranks)
            events.add(Note("starting trainer ranks"))
            stage = make(config, events, ranks, checkpoint)
            stage.train()
    with _rank_0_speaks(world):
        stage.require_whole()


def _prepared(config: C, name: str, resume: str | None, closing: ExitStack) -> tuple[C, Path | None]:
    """With absolute paths, and the checkpoint that the run goes on from; `closing` lets the run's folder go."""
    config = require_sound(config)
    return config, begin_run(config, name, resume, closing)


class _Shown(EventLog):
    """Shows events as they happen, where there is somebody to show them to; any rank may get the signal."""

    def __init__(self, progress: RunProgress | None, ranks: SpmdWorld) -> None:
        super().__init__()
        self._progress, self._ranks = progress, ranks

    def add(self, event: Event) -> None:
        """Show it."""
        if self._progress is not None:
            show(event, self._progress)

    def ends_early(self) -> bool:
        """See `EventLog`; the ranks look at the same moment, and all end where one was asked to."""
        return self._ranks.any(early_stop_signal.is_asked())


@contextmanager
def _rank_0_speaks(world: TorchrunWorld) -> Iterator[None]:
    """For a block that says on every rank that the run was stopped: torchrun ends all as soon as one rank has ended."""
    try:
        yield
    except StoppedEarly as stopped:
        if world.rank == 0:
            raise
        code = stopped.exit_code
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(STOP_SECONDS)
        raise SystemExit(code) from None
