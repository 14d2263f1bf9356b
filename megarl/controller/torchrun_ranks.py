"""Join the ranks of torchrun, and report one error if they fail.

If a rank fails and exits, torchrun kills the others. These see broken connections or a signal, whichever comes first.
The first rank to fail records itself in the shared store, and only that one reports its error.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from megarl.config.placement import PlacementConfig
from megarl.controller.ray_session import sigterm_as_interrupt
from megarl.controller.run_stage import STOP_SECONDS
from megarl.errors import ConfigError, MegarlError, WorkerError
from megarl.groups.trainer_group import rank_environment
from megarl.megatron.runtime import platform
from megarl.placement.hardware import visible_gpu_names
from megarl.placement.network import use_network_to_master
from megarl.process.torchrun_env import TorchrunWorld, report_on_rank0
from megarl.workers.spmd import SpmdWorld

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
