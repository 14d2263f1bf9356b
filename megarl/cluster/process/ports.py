"""TCP ports of this node: whether they are in use, and some that no process uses."""

from __future__ import annotations

import random
import socket
from itertools import islice
from pathlib import Path

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
