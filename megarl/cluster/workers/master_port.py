"""The port of torch.distributed's store, held by rank 0's process from the moment it is chosen.

    rank 0's process    reserve_master_port      binds a port chosen by the system and listens on it
    controller          rank_variables           tells all ranks the port
    all ranks           join_world               rank 0's store takes over the socket; the others connect to it

No other process can take the port in between.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

BACKLOG = 4096
"""Connections that may wait until rank 0's store accepts them: other ranks may be ready first."""

_reserved: socket.socket | None = None


def reserve_master_port() -> int:
    """Listen on a free port of all interfaces and return it; `join_world` in this process takes the socket over."""
    global _reserved
    if socket.has_dualstack_ipv6():
        _reserved = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    else:
        _reserved = socket.create_server(("", 0), backlog=BACKLOG)
    return int(_reserved.getsockname()[1])


def join_world(backend: str, timeout: timedelta) -> None:
    """Initialize torch.distributed from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Collective call on all ranks.

    Rank 0 hosts the store, on the socket of `reserve_master_port` if it has called that.
    """
    global _reserved
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    options: dict[str, Any] = {}
    if _reserved is not None:
        assert _reserved.getsockname()[1] == port, (_reserved, port)
        options["master_listen_fd"], _reserved = _reserved.detach(), None
    store = TCPStore(address, port, size, rank == 0, timeout, multi_tenant=True, **options)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
