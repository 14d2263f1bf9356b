"""TCP ports of this node: whether they are in use, and one that no process uses."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST_PORT = 20_000
"""Lowest port that `find_unused_port` returns; services of the system have lower ones."""

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
    """Return a random port on which another process of this node can listen later.

    It is below the ports that the kernel assigns by itself, so that no outgoing connection takes it in between.
    """
    ephemeral = int(EPHEMERAL_RANGE.read_text().split()[0])
    candidates = range(LOWEST_PORT, ephemeral) if ephemeral > LOWEST_PORT else range(LOWEST_PORT, 65536)
    return next(port for port in random.sample(candidates, len(candidates)) if is_port_free(port))


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
