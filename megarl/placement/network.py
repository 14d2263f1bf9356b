"""Which of this node's networks leads to another node."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, Protocol

import psutil

from megarl.errors import ConfigError

SEEN = "megarl/master"
"""Where ranks note which address MASTER_ADDR is to them."""


def interface_to(address: str) -> tuple[str, str]:
    """This node's own address towards `address` (a node's address or name), and the interface that has it.

    The routing table tells; nothing is sent.

    Raises:
        ConfigError: no such name, or no route leads there.
    """
    try:
        family, target = _resolve(address)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            local: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"{socket.gethostname()} finds no way to {address}: {error.strerror}") from None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == family and each.address.partition("%")[0] == local for each in addresses):
            return local, name
    raise ConfigError(f"{socket.gethostname()} reaches {address} from {local}, which none of its interfaces has")


def interface_of(address: str) -> str | None:
    """The interface that has `address`; None: none of this node's."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, each in interfaces if address in (entry.address for entry in each)), None)


def interface_variables(interface: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make gloo and NCCL use `interface`, save those that `environment` has already.

    Left to itself, gloo takes the interface that the host's own name resolves to: often the loopback.
    """
    variables = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # =: no other that begins so
    return {name: value for name, value in variables.items() if name not in environment}


class Store(Protocol):
    """What all ranks share, as torch.distributed's stores are."""

    def set(self, key: str, value: str) -> None:
        """Set."""
        ...

    def get(self, key: str) -> bytes:
        """Block until it is set."""
        ...


def use_network_to_master(store: Store, rank: int, size: int) -> None:
    """Have gloo and NCCL use the interface that leads to MASTER_ADDR; called by all ranks, before they join.

    On the master's own node that name may mean the loopback. Its ranks take the address that others know it by.
    """
    master = os.environ["MASTER_ADDR"]
    local, interface = interface_to(master)
    store.set(f"{SEEN}/{rank}", _resolve(master)[1][0])
    if is_loopback(local):
        seen = (store.get(f"{SEEN}/{other}").decode() for other in range(size))
        outside = next((address for address in seen if not is_loopback(address)), local)
        _, interface = interface_to(outside)
    os.environ.update(interface_variables(interface, os.environ))


def _resolve(address: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    return family, target


def is_loopback(address: str) -> bool:
    """Whether `address` does not leave the machine."""
    return ip_address(address.partition("%")[0]).is_loopback
