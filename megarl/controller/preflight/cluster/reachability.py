"""Which addresses a node's processes listen on, and whether other nodes can reach them.

Each node starts a server on a free port that sends its name to every client. Other nodes connect to each of its
addresses and compare the name, since another host may answer at an address that is not unique, such as a container
bridge's.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

MAX_PARALLEL_PROBES = 64
"""Connections attempted at the same time."""

MAX_NAME_BYTES = 256
"""Maximum length of a server's name in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """The network interface that gloo listens on."""

    name: str
    """Value of GLOO_SOCKET_IFNAME, or the interface that has `address`; empty if none has it."""
    address: str | None
    """IP address; None if the interface does not exist or has no address."""
    is_chosen: bool
    """Whether GLOO_SOCKET_IFNAME sets it; otherwise gloo resolves the host name."""

    @property
    def is_loopback(self) -> bool:
        """Whether the address is a loopback address, which other nodes cannot reach."""
        return self.address is not None and ipaddress.ip_address(self.address).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address at which a node's echo server should be reachable."""

    name: str
    """Name of the echo server."""
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EchoServer:
    """TCP server that sends its name to every client, until it is closed or the process exits."""

    def __init__(self, name: str, *, address: str) -> None:
        """`address`: an address of this node in the family, IPv4 or IPv6, that clients will use."""
        self._name = name.encode()
        assert len(self._name) <= MAX_NAME_BYTES, name
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections and close the socket."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the server thread, which close alone does not
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return  # the socket was closed
            with client, contextlib.suppress(OSError):  # the client disconnected
                client.sendall(self._name)


def probe(addresses: Sequence[Address], *, seconds: float) -> list[str | None]:
    """Return, for each address, why its server cannot be reached within `seconds`; None if it can."""
    if not addresses:
        return []
    with ThreadPoolExecutor(min(len(addresses), MAX_PARALLEL_PROBES)) as pool:
        return list(pool.map(lambda address: _probe(address, seconds), addresses))


def _probe(address: Address, seconds: float) -> str | None:
    try:
        with (
            socket.create_connection((address.host, address.port), timeout=seconds) as connection,
            connection.makefile("rb") as reply,
        ):
            name = reply.read(MAX_NAME_BYTES)
    except OSError as error:
        return (error.strerror or str(error)).lower()  # a timeout has no strerror
    return None if name == address.name.encode() else "another host answers at this address"


def gloo_interface() -> Interface:
    """Return the interface that gloo will choose in a process with the current environment."""
    interfaces = {
        name: [each.address.partition("%")[0] for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
    }
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        first, *_ = chosen.split(",")  # gloo rotates over several; the first one is checked
        return Interface(name=first, address=next(iter(interfaces.get(first, [])), None), is_chosen=True)
    address = _hostname_address()
    name = next((name for name, addresses in interfaces.items() if address in addresses), "")
    return Interface(name=name, address=address, is_chosen=False)


def _hostname_address() -> str:
    """Return the first address of this host's name that a socket can bind to; 127.0.0.1 if there is none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, error_type, protocol, _, target in found:
        with socket.socket(family, error_type, protocol) as probe:
            try:
                probe.bind(target)
            except OSError:
                continue
        return str(target[0])
    return "127.0.0.1"
