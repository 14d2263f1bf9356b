"""Runs a function on several real ranks (gloo, one process each) and returns rank 0's result.

Every call starts new processes, so no state carries over to the next call. They are forked from one process that has
imported torch and megatron-core (`preloaded.py`), since importing both takes seconds.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from megarl.reshard.transfer.bucket import open_bucket

TIMEOUT_SECONDS = 150.0
GRACE_SECONDS = 2.0
"""Time for the other ranks to write their stacks after one rank has failed."""


def run_ranks(
    function: Callable[..., Any],
    world: int,
    tmp_path: Path,
    *arguments: Any,
    timeout: float = TIMEOUT_SECONDS,
) -> Any:
    """Run `function(*arguments)` on `world` ranks; returns the result of rank 0.

    Args:
        function: imported by name in the ranks, so it must be defined at module level.

    Raises:
        ProcessRaisedException: a rank raised; has the traceback of the first. The others are terminated.
        TimeoutError: a rank took longer than `timeout` seconds; has the stacks of all ranks.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = tmp_path / f"result-{port}.pt"
    stacks = [tmp_path / f"stack-{port}-{rank}.txt" for rank in range(world)]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    multiprocessing.set_forkserver_preload([f"{__package__}.preloaded"])
    try:
        arguments_of_entry = (environment, str(out), stacks, timeout, function, arguments)
        context = mp.start_processes(_entry, arguments_of_entry, world, join=False, start_method="forkserver")
        while not context.join(grace_period=GRACE_SECONDS):
            pass
    except mp.ProcessExitedException as error:
        hung = {rank: stack.read_text() for rank, stack in enumerate(stacks) if stack.exists() and stack.stat().st_size}
        if not hung:
            raise
        shown = "\n".join(f"-- rank {rank}\n{text}" for rank, text in hung.items())
        raise TimeoutError(f"{function.__qualname__}: a rank took longer than {timeout:g} s\n{shown}") from error
    return torch.load(out, weights_only=False)


def _entry(
    rank: int,
    environment: Mapping[str, str],
    out: str,
    stacks: list[Path],
    timeout: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()  # the forkserver has the environment of an earlier call
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    with stacks[rank].open("w") as stack:
        faulthandler.dump_traceback_later(timeout, file=stack, exit=True)
        result = function(*arguments)
        faulthandler.cancel_dump_traceback_later()
    if rank == 0:
        torch.save(result, out)


class CollectingSink:
    """A weight sink that keeps copies of all tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def load(self, bucket):
        self.tensors.update({name: t.clone() for name, t in open_bucket(bucket).items()})
        return lambda: None
