"""Network interfaces: finds the interface of this node through which it reaches another node."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, Protocol

import psutil

from megarl.errors import ConfigError

MASTER_KEY = "megarl/master"
"""Key in the store under which each rank writes the address that MASTER_ADDR resolves to for it."""


def interface_to(address: str) -> tuple[str, str]:
    """Return this node's own address on the route to `address` (an address or host name), and its interface.

    Reads the routing table; sends no packets.

    Raises:
        ConfigError: the name does not resolve, or there is no route.
    """
    try:
        family, target = _resolve(address)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            local: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"{socket.gethostname()} has no route to {address}: {error.strerror}") from None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == family and each.address.partition("%")[0] == local for each in addresses):
            return local, name
    raise ConfigError(f"{socket.gethostname()} reaches {address} from {local}, which no interface of it has")


def interface_of(address: str) -> str | None:
    """Return the interface of this node that has `address`; None if there is none."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, each in interfaces if address in (entry.address for entry in each)), None)


def interface_variables(interface: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make gloo and NCCL use `interface`, without those that `environment` already sets.

    By default gloo uses the interface that the host's own name resolves to, which is often the loopback.
    """
    variables = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
    }  # =: exact name
    return {name: value for name, value in variables.items() if name not in environment}


class Store(Protocol):
    """A key-value store that all ranks share, such as torch.distributed's stores."""

    def set(self, key: str, value: str) -> None:
        """Set `key` to `value`."""
        ...

    def get(self, key: str) -> bytes:
        """Wait until `key` is set and return its value."""
        ...


def use_network_to_master(store: Store, rank: int, size: int) -> None:
    """Make gloo and NCCL use the interface that leads to MASTER_ADDR; all ranks call this before they join.

    On the master's own node MASTER_ADDR may resolve to the loopback. Its ranks then use the address that ranks on other
    nodes resolve it to.
    """
    master = os.environ["MASTER_ADDR"]
    local, interface = interface_to(master)
    store.set(f"{MASTER_KEY}/{rank}", _resolve(master)[1][0])
    if is_loopback(local):
        seen = (store.get(f"{MASTER_KEY}/{other}").decode() for other in range(size))
        outside = next((address for address in seen if not is_loopback(address)), local)
        _, interface = interface_to(outside)
    os.environ.update(interface_variables(interface, os.environ))


def _resolve(address: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    return family, target


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address."""
    return ip_address(address.partition("%")[0]).is_loopback
