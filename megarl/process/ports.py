"""Finds out whether TCP ports are in use."""

from __future__ import annotations

import socket


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
