"""Runs a function on several real ranks (gloo, spawned processes) and returns rank 0's result."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from megarl.reshard.bucket import open_bucket


def run_ranks(function: Callable[..., Any], world: int, tmp_path: Path, *arguments: Any) -> Any:
    """`function(*arguments)` on `world` ranks; what rank 0 returned."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = tmp_path / f"result-{port}.pt"
    mp.spawn(_entry, args=(world, port, str(out), function, arguments), nprocs=world)
    return torch.load(out, weights_only=False)


def _entry(rank: int, world: int, port: int, out: str, function: Callable[..., Any], arguments: tuple) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    result = function(*arguments)
    if rank == 0:
        torch.save(result, out)


class CollectingSink:
    """A weight sink that keeps copies of everything."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def load(self, bucket):
        self.tensors.update({name: t.clone() for name, t in open_bucket(bucket).items()})
        return lambda: None
