"""Runs a function on several real ranks (one process each, gloo or NCCL) and returns rank 0's result.

Every call starts new processes, so no state carries over to the next call. On the CPU they are forked from one process
that has imported torch and megatron-core (`preloaded.py`), since importing both takes seconds. CUDA cannot be used in
forked processes.
"""

import faulthandler
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from megarl.reshard.transfer.bucket import open_bucket
from tests.time_limits import HANG_SECONDS

GRACE_SECONDS = 60.0
"""Time for the other ranks to write their stacks, or to notice that they have lost one that has failed."""


def run_ranks(
    function: Callable[..., Any],
    world: int,
    tmp_path: Path,
    *arguments: Any,
    timeout: float = HANG_SECONDS,
    device: str = "cpu",
) -> Any:
    """Run `function(*arguments)` on `world` ranks; returns the result of rank 0, with tensors on the CPU.

    Args:
        device: `cpu` hides all CUDA devices from the ranks; `cuda` gives each rank one of its own.
        function: imported by name in the ranks, so it must be defined at module level.

    Raises:
        ProcessRaisedException: a rank raised; has the traceback of the first. The others are terminated.
        TimeoutError: a rank took longer than `timeout` seconds; has the stacks of all ranks.
    """
    reserved = _reserve_port()
    port = reserved.getsockname()[1]
    out = tmp_path / f"result-{port}.pt"
    stacks = [tmp_path / f"stack-{port}-{rank}.txt" for rank in range(world)]
    devices = _cuda_devices()[:world] if device == "cuda" else [""] * world
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    environments = [
        {**os.environ, **address, "RANK": str(rank), "CUDA_VISIBLE_DEVICES": devices[rank]} for rank in range(world)
    ]
    multiprocessing.set_forkserver_preload([f"{__package__}.preloaded"])
    try:
        arguments_of_entry = (environments, str(out), stacks, timeout, function, arguments)
        method = "forkserver" if device == "cpu" else "spawn"
        context = mp.start_processes(_entry, arguments_of_entry, world, join=False, start_method=method)
        while not context.join(grace_period=GRACE_SECONDS):
            pass
    except mp.ProcessExitedException as error:
        hung = {rank: stack.read_text() for rank, stack in enumerate(stacks) if stack.exists() and stack.stat().st_size}
        if not hung:
            raise
        shown = "\n".join(f"-- rank {rank}\n{text}" for rank, text in hung.items())
        raise TimeoutError(f"{function.__qualname__}: a rank took longer than {timeout:g} s\n{shown}") from error
    finally:
        reserved.close()
    return torch.load(out, weights_only=False, map_location="cpu")


def _cuda_devices() -> list[str]:
    """Return the names of this process's CUDA devices, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(map(str, range(torch.cuda.device_count()))) if visible is None else visible.split(",")


def _reserve_port() -> socket.socket:
    """Return a socket that keeps its port for rank 0's store: only sockets with SO_REUSEADDR can share it."""
    reserved = socket.socket()
    reserved.bind(("", 0))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reserved


def _entry(
    rank: int,
    environments: Sequence[Mapping[str, str]],
    out: str,
    stacks: list[Path],
    timeout: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()  # the forkserver has the environment of an earlier call
    os.environ.update(environments[rank])
    torch.set_num_threads(1)
    with stacks[rank].open("w") as stack:
        faulthandler.dump_traceback_later(timeout, file=stack, exit=True)
        result = function(*arguments)
        faulthandler.cancel_dump_traceback_later()
    if rank == 0:
        torch.save(result, out)


def sample(cases: Iterable[Any], default: Iterable[Any]) -> list[Any]:
    """Return parameters of all cases, of which those that are not in `default` are marked as slow."""
    every, chosen = list(cases), list(default)
    assert all(case in every for case in chosen), [case for case in chosen if case not in every]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in chosen else pytest.mark.slow)
        for case in every
    ]


class CollectingSink:
    """A weight sink that keeps copies of all tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def load(self, bucket):
        self.tensors.update({name: t.clone() for name, t in open_bucket(bucket).items()})
        return lambda: None
