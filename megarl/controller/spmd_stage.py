"""Run a training stage in the processes of torchrun, without Ray: every rank runs the stage's loop and its own worker.

torchrun ---> rank 0: loop -> SpmdGroup -> worker    shows progress, writes metrics, locks the run folder
         `--> rank 1: loop -> SpmdGroup -> worker    prints nothing, unless it is the first rank to fail
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol, override

from megarl.config import StageConfig
from megarl.config.tracking import TrackingConfig
from megarl.controller.run_stage import STOP_SECONDS, begin_run, resolve_and_check, show_event
from megarl.controller.torchrun_ranks import join_ranks
from megarl.errors import EarlyStop
from megarl.process import early_stop_signal
from megarl.process.torchrun_env import TorchrunWorld
from megarl.run.events import Event, EventLog, MessageEvent
from megarl.tracking.progress import RunProgress
from megarl.workers.group import Processes
from megarl.workers.spmd import SpmdWorld

NO_TRACKING = TrackingConfig(tensorboard=False, jsonl=False, rollouts=False)


class StageLoop(Protocol):
    """The loop of a training stage, such as `megarl.stages.sft.SftRun`."""

    def train(self) -> None:
        """Run all steps and export the model."""
        ...

    def raise_if_stopped_early(self) -> None:
        """Return if `train` ran all steps.

        Raises:
            EarlyStop: it ended early, on every rank alike.
        """
        ...


def run_spmd_stage[C: StageConfig](
    config: C,
    make: Callable[[C, EventLog, Processes, Path | None], StageLoop],
    world: TorchrunWorld,
    *,
    name: str,
    resume: str | None = None,
) -> None:
    """Run a stage on the ranks of torchrun; call it on every rank.

    Args:
        make: builds the stage's loop from configuration, event log, processes and the checkpoint folder to resume from.
        world: torchrun's ranks, one per slot.
        name: file name, without suffix, of the resolved configuration in the run folder.
        resume: `auto`, a step or a checkpoint folder, see `megarl.controller.resume`; None: start a new run.

    Raises:
        MegarlError: the error that ended the run, on the first rank that failed; the others exit with its exit code.
    """
    with join_ranks(config.placement, world) as ranks, ExitStack() as closing:
        config, checkpoint = ranks.run_on_rank0(lambda: _prepare(config, name, resume, closing))
        if world.rank != 0:
            config = config.model_copy(update={"tracking": NO_TRACKING})
        with RunProgress(config.trainer.steps) if world.rank == 0 else nullcontext() as progress:
            events = _DisplayedEventLog(progress, ranks)
            events.add(MessageEvent("starting trainer ranks"))
            stage = make(config, events, ranks, checkpoint)
            stage.train()
    with _report_stop_on_rank0(world):
        stage.raise_if_stopped_early()


def _prepare[C: StageConfig](config: C, name: str, resume: str | None, closing: ExitStack) -> tuple[C, Path | None]:
    """Return the checked configuration and the checkpoint to resume from; `closing` unlocks the run folder."""
    config = resolve_and_check(config, resume=resume)
    return config, begin_run(config, name, resume, closing)


class _DisplayedEventLog(EventLog):
    """Event log that shows events at once, on the rank that has a `progress`, and shares stop signals among ranks."""

    def __init__(self, progress: RunProgress | None, ranks: SpmdWorld) -> None:
        super().__init__()
        self._progress, self._ranks = progress, ranks

    @override
    def add(self, event: Event) -> None:
        if self._progress is not None:
            show_event(event, self._progress)

    @override
    def should_stop(self) -> bool:
        """Return True on all ranks if any of them has received the stop signal; a collective call."""
        return self._ranks.any(early_stop_signal.stop_requested())


@contextmanager
def _report_stop_on_rank0(world: TorchrunWorld) -> Iterator[None]:
    """If the block raises EarlyStop on every rank, let rank 0 report it and the others exit later with the same code.

    torchrun kills all ranks as soon as one has exited, so the others wait for that.
    """
    try:
        yield
    except EarlyStop as stopped:
        if world.rank == 0:
            raise
        code = stopped.exit_code
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(STOP_SECONDS)
        raise SystemExit(code) from None
