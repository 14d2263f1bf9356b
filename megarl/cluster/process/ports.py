"""TCP ports of this node: whether they are in use, some that no process uses, and the port of torch's store.

Rank 0's process holds the port of the store from the moment it is chosen, so that no other process can take it:

    rank 0's process    reserve_master_port      binds a port chosen by the system and listens on it
    controller          rank_variables           tells all ranks the port
    all ranks           join_world               rank 0's store takes over the socket; the others connect to it
"""

from __future__ import annotations

import os
import random
import socket
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.errors import WorkerError

LOWEST_PORT = 20_000
"""Lowest port that `find_unused_ports` returns; services of the system have lower ones."""

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the range of ports that the kernel assigns to outgoing connections."""


def is_port_free(port: int) -> bool:
    """Return whether a server could listen on `port` of all interfaces of this node."""
    with socket.socket() as probe:
        # as servers do: a port whose previous connections are in TIME_WAIT is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def find_unused_port() -> int:
    """Return a port as `find_unused_ports` does."""
    return find_unused_ports(1)[0]


def find_unused_ports(count: int) -> list[int]:
    """Return `count` different random ports on which another process of this node can listen later.

    They are below the ports that the kernel assigns by itself, so that no outgoing connection takes one in between.

    Raises:
        WorkerError: so many are not free.
    """
    ephemeral = int(EPHEMERAL_RANGE.read_text().split()[0])
    candidates = range(LOWEST_PORT, ephemeral) if ephemeral > LOWEST_PORT else range(LOWEST_PORT, 65536)
    # not by the global generator: processes with the same seed would choose the same ports
    shuffled = random.Random().sample(candidates, len(candidates))
    found = list(islice(filter(is_port_free, shuffled), count))
    if len(found) < count:
        where = f"{candidates[0]} to {candidates[-1]}"
        raise WorkerError(f"{socket.gethostname()} has no {count} free ports from {where}")
    return found


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
