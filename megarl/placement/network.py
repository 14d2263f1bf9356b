"""Which of this node's networks leads to another node."""

from __future__ import annotations

import os
import socket

import psutil

from megarl.errors import ConfigError


def interface_to(address: str) -> tuple[str, str]:
    """This node's own address towards `address` (a node's address or name), and the interface that has it.

    The routing table tells; nothing is sent.

    Raises:
        ConfigError: no such name, or no route leads there.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            local: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"{socket.gethostname()} finds no way to {address}: {error.strerror}") from None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == family and each.address.partition("%")[0] == local for each in addresses):
            return local, name
    raise ConfigError(f"{socket.gethostname()} reaches {address} from {local}, which none of its interfaces has")


def interface_variables(interface: str) -> dict[str, str]:
    """Variables that make gloo and NCCL use `interface`, save those that this process's environment has already.

    Left to itself, gloo takes the interface that the host's own name resolves to: often the loopback.
    """
    variables = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # =: no other that begins so
    return {name: value for name, value in variables.items() if name not in os.environ}
