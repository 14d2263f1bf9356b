"""Being one of torchrun's ranks: joining the others, and ending with them.

A rank that fails ends, and torchrun the others with it. They see its connections break or are interrupted, whichever
comes first; so ranks note in the store that they all share which of them was first, and only that one speaks.
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
from megarl.controller.ray_session import terminated_is_interrupted
from megarl.controller.run_stage import STOP_SECONDS
from megarl.errors import ConfigError, MegarlError, WorkerError
from megarl.groups.trainer_group import rank_environment
from megarl.megatron.runtime import platform
from megarl.placement.hardware import visible_gpus
from megarl.placement.network import use_network_to_master
from megarl.process.torchrun_env import TorchrunWorld, said_once
from megarl.workers.spmd import SpmdWorld

INTERRUPTED = 130
"""128 + SIGINT, as shells count."""

FAILED = "megarl/failed"
"""Key of the rank that was the first to fail."""

COLLECTIVE_SECONDS = 600.0
"""Longest wait in a collective."""


@contextmanager
def joined_ranks(placement: PlacementConfig, world: TorchrunWorld) -> Iterator[SpmdWorld]:
    """The ranks of `world`, this process being one, with a device each.

    Raises:
        MegarlError: what ended the block, on the rank that speaks for all; the others exit with their code.
    """
    with said_once(world):
        device = choose_device(placement, world)
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=placement.start_timeout_seconds)))
    with (
        terminated_is_interrupted(),
        _heard_everywhere(),
        _one_voice(world, store),
        _joined(world, device, store),
    ):
        yield SpmdWorld(device)


def choose_device(placement: PlacementConfig, world: TorchrunWorld) -> str:
    """`cpu` or `cuda`, from the configuration and what this machine has.

    Raises:
        ConfigError: cuda was asked for, and the machine has too few GPUs.
    """
    if placement.device == "cpu":
        return "cpu"
    gpus = len(visible_gpus())
    if placement.device == "cuda" and gpus < world.local_size:
        raise ConfigError(
            f"placement.device: cuda needs a GPU for each of torchrun's {world.local_size} ranks on this machine, "
            f"got {gpus}"
        )
    return "cuda" if gpus >= world.local_size else "cpu"


@contextmanager
def _joined(world: TorchrunWorld, device: str, store: Store) -> Iterator[None]:
    """A member of torch.distributed's world, with its device."""
    os.environ.update(rank_environment(device))
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch has read the variable already
    platform.prepare()
    use_network_to_master(store, world.rank, world.size)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group(platform.backend(), store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    yield
    dist.destroy_process_group()


@contextmanager
def _one_voice(world: TorchrunWorld, store: Store) -> Iterator[None]:
    """Of the ranks that the block fails on, the first raises its error; the others end without a word.

    Interrupted, all end; rank 0 says so.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # it is ending already
        if isinstance(error, KeyboardInterrupt):
            code, speaks = INTERRUPTED, world.rank == 0 and not _has_failed(store)
        else:
            code = error.exit_code if isinstance(error, MegarlError) else MegarlError.exit_code
            speaks = _fails_first(store, world.rank)
        threading.Thread(target=_exit_after, args=(STOP_SECONDS, code), daemon=True).start()
        if not speaks:
            raise SystemExit(code) from None
        if isinstance(error, MegarlError | KeyboardInterrupt):
            raise
        trace = "".join(traceback.format_exception(error))
        raise WorkerError(f"the run failed on rank {world.rank}:\n{trace}") from error


def _fails_first(store: Store, rank: int) -> bool:
    try:
        return bool(store.compare_set(FAILED, "", str(rank)) == str(rank).encode())
    except dist.DistError:
        return False  # whoever kept the store has ended before


def _has_failed(store: Store) -> bool:
    try:
        return bool(store.check([FAILED]))
    except dist.DistError:
        return False


@contextmanager
def _heard_everywhere() -> Iterator[None]:
    """Ends the process where it waits in native code, which no signal interrupts, while others end in order."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_exit_when_signalled, args=(reading,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)


def _exit_when_signalled(pipe: int) -> None:
    signalled = os.read(pipe, 1)
    os.close(pipe)
    if signalled:
        _exit_after(STOP_SECONDS, INTERRUPTED)


def _exit_after(seconds: float, code: int) -> None:
    time.sleep(seconds)
    os._exit(code)
