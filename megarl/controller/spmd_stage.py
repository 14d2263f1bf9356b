"""Run a training stage in the processes of torchrun, without Ray: every rank runs the stage's loop and its own worker.

torchrun ---> rank 0: loop -> SpmdGroup -> worker    shows progress, writes metrics, locks the run folder
         `--> rank 1: loop -> SpmdGroup -> worker    prints nothing, unless it is the first rank to fail

If a rank fails and exits, torchrun kills the others. These see broken connections or a signal, whichever comes first.
The first rank to fail records itself in the shared store, and only that one reports its error.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Protocol, override

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from megarl.cluster.placement.hardware import use_network_to_master, visible_gpu_names
from megarl.cluster.process import launcher_env
from megarl.cluster.process.launcher_env import TorchrunWorld, report_on_rank0
from megarl.cluster.workers.group import Processes
from megarl.cluster.workers.spmd import SpmdWorld
from megarl.config import StageConfig
from megarl.config.placement import PlacementConfig
from megarl.config.run import TrackingConfig
from megarl.controller.ray_session import sigterm_as_interrupt
from megarl.controller.run_stage import STOP_SECONDS, begin_run, resolve_and_check, show_event
from megarl.errors import ConfigError, EarlyStop, MegarlError, WorkerError
from megarl.megatron.runtime import platform
from megarl.run.remote.trainer_group import rank_environment
from megarl.tracking.progress import Event, EventLog, MessageEvent, RunProgress

INTERRUPTED_EXIT_CODE = 130
"""Exit code of an interrupted process by shell convention: 128 + SIGINT."""

FAILED_RANK_KEY = "megarl/failed"
"""Key in the store that holds the first rank to fail."""

COLLECTIVE_TIMEOUT_SECONDS = 600.0
"""Timeout of a collective operation."""


@contextmanager
def join_ranks(placement: PlacementConfig, world: TorchrunWorld) -> Iterator[SpmdWorld]:
    """Join the process group of `world`, with one device per rank.

    Raises:
        MegarlError: the error that ended the block, on the first rank that failed; the others exit with their code.
    """
    with report_on_rank0(world):
        device = choose_device(placement, world)
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=placement.start_timeout_seconds)))
    with (
        sigterm_as_interrupt(),
        _exit_on_signal(),
        _first_failure_reports(world, store),
        _process_group(world, device, store),
    ):
        yield SpmdWorld(device)


def choose_device(placement: PlacementConfig, world: TorchrunWorld) -> str:
    """Return `cpu` or `cuda`, from the configuration and the GPUs of this node.

    Raises:
        ConfigError: cuda is requested and the node has fewer GPUs than ranks.
    """
    if placement.device == "cpu":
        return "cpu"
    gpus = len(visible_gpu_names())
    if placement.device == "cuda" and gpus < world.local_size:
        raise ConfigError(
            f"placement.device: cuda needs a GPU for each of torchrun's {world.local_size} ranks on this node, "
            f"got {gpus}"
        )
    return "cuda" if gpus >= world.local_size else "cpu"


@contextmanager
def _process_group(world: TorchrunWorld, device: str, store: Store) -> Iterator[None]:
    """Set up this rank's device and torch.distributed's default process group."""
    os.environ.update(rank_environment(device, visible_gpu_names()))
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch read the variable at import
    platform.prepare()
    use_network_to_master(store, world.rank, world.size)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    dist.init_process_group(platform.backend(), store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    yield
    dist.destroy_process_group()


@contextmanager
def _first_failure_reports(world: TorchrunWorld, store: Store) -> Iterator[None]:
    """If the block fails, raise the error on the first rank that failed; the other ranks exit without a message.

    On an interrupt, rank 0 raises KeyboardInterrupt and the others exit.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # the process is exiting already
        if isinstance(error, KeyboardInterrupt):
            code, is_reporter = INTERRUPTED_EXIT_CODE, world.rank == 0 and not _has_failed(store)
        else:
            code = error.exit_code if isinstance(error, MegarlError) else MegarlError.exit_code
            is_reporter = _is_first_failure(store, world.rank)
        threading.Thread(target=_exit_after, args=(STOP_SECONDS, code), daemon=True).start()
        if not is_reporter:
            raise SystemExit(code) from None
        if isinstance(error, MegarlError | KeyboardInterrupt):
            raise
        trace = "".join(traceback.format_exception(error))
        raise WorkerError(f"the run failed on rank {world.rank}:\n{trace}") from error


def _is_first_failure(store: Store, rank: int) -> bool:
    try:
        return bool(store.compare_set(FAILED_RANK_KEY, "", str(rank)) == str(rank).encode())
    except dist.DistError:
        return False  # the rank that hosts the store exited earlier


def _has_failed(store: Store) -> bool:
    try:
        return bool(store.check([FAILED_RANK_KEY]))
    except dist.DistError:
        return False


@contextmanager
def _exit_on_signal() -> Iterator[None]:
    """Exit STOP_SECONDS after a signal, even if the main thread hangs in native code, where no handler runs.

    Python handlers run in the main thread only; a thread that reads the wakeup file descriptor is not affected.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_wait_for_signal, args=(reading,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)


def _wait_for_signal(pipe: int) -> None:
    signalled = os.read(pipe, 1)
    os.close(pipe)
    if signalled:
        _exit_after(STOP_SECONDS, INTERRUPTED_EXIT_CODE)


def _exit_after(seconds: float, code: int) -> None:
    time.sleep(seconds)
    os._exit(code)


NO_TRACKING = TrackingConfig(tensorboard=False, jsonl=False, rollouts=False)


class StageLoop(Protocol):
    """The loop of a training stage, such as `megarl.stages.SftRun`."""

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
        return self._ranks.any(launcher_env.stop_requested())


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
