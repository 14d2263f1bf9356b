"""Where a node's processes can be met, and whether other nodes get there.

A node opens a door at a port that the system chose; others knock at each of its addresses and are told whose it is,
since another machine may answer at an address that is not unique, such as a container bridge's.
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

KNOCKING = 64
"""Doors knocked at at once."""

LONGEST_NAME = 256
"""Bytes of a door's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What gloo listens on."""

    name: str
    """As GLOO_SOCKET_IFNAME has it, or of the interface that has the address; empty where none has it."""
    address: str | None
    """None where there is no such interface, or it has no address."""
    is_chosen: bool
    """By GLOO_SOCKET_IFNAME; else it is where this host's own name leads."""

    @property
    def is_loopback(self) -> bool:
        """Whether no other node can come there."""
        return self.address is not None and ipaddress.ip_address(self.address).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One at which a node's door should be found."""

    name: str
    """Of the door."""
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Door:
    """Tells everybody who connects its name, until the process ends."""

    def __init__(self, name: str, *, address: str) -> None:
        """`address`: one of this node, of the kind of address (IPv4, IPv6) that others will use."""
        self._name = name.encode()
        assert len(self._name) <= LONGEST_NAME, name
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._answer, daemon=True).start()

    def close(self) -> None:
        """Nobody is told any more."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close alone does not
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return  # it was closed
            with caller, contextlib.suppress(OSError):  # who hung up need not be told
                caller.sendall(self._name)


def knock(addresses: Sequence[Address], *, seconds: float) -> list[str | None]:
    """By address, why its door cannot be reached from here within `seconds`; None where it can."""
    if not addresses:
        return []
    with ThreadPoolExecutor(min(len(addresses), KNOCKING)) as pool:
        return list(pool.map(lambda address: _knock(address, seconds), addresses))


def _knock(address: Address, seconds: float) -> str | None:
    try:
        with (
            socket.create_connection((address.host, address.port), timeout=seconds) as door,
            door.makefile("rb") as said,
        ):
            name = said.read(LONGEST_NAME)
    except OSError as error:
        return (error.strerror or str(error)).lower()  # a timeout has no strerror
    return None if name == address.name.encode() else "another machine answers there"


def gloo_interface() -> Interface:
    """As gloo will choose it in a process with this one's environment."""
    interfaces = {
        name: [each.address.partition("%")[0] for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
    }
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        first, *_ = chosen.split(",")  # of several, each pair of processes takes all in turn
        return Interface(name=first, address=next(iter(interfaces.get(first, [])), None), is_chosen=True)
    address = _own_name_leads_to()
    name = next((name for name, addresses in interfaces.items() if address in addresses), "")
    return Interface(name=name, address=address, is_chosen=False)


def _own_name_leads_to() -> str:
    """The first address of this host's own name that a socket can be bound to; failing that, the loopback."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, kind, protocol, _, target in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(target)
            except OSError:
                continue
        return str(target[0])
    return "127.0.0.1"
