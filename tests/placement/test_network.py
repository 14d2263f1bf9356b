from __future__ import annotations

import socket

import psutil
import pytest

from megarl.errors import ConfigError
from megarl.placement.network import interface_to, interface_variables


def test_this_machine_is_reached_over_its_loopback():
    loopbacks = [name for name, found in psutil.net_if_addrs().items() if "127.0.0.1" in {a.address for a in found}]
    assert interface_to("127.0.0.1") == ("127.0.0.1", *loopbacks)
    assert interface_to("127.3.2.1")[1:] == tuple(loopbacks)


def test_an_address_of_its_own_is_reached_over_the_interface_that_has_it():
    for name, found in psutil.net_if_addrs().items():
        for address in (a.address for a in found if a.family == socket.AF_INET):
            assert interface_to(address) == (address, name)


def test_what_cannot_be_reached_is_named():
    with pytest.raises(ConfigError, match=r"^\S+ finds no way to no-such-host\.invalid: "):
        interface_to("no-such-host.invalid")


def test_what_the_user_has_set_stays(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert interface_variables("eth1") == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert interface_variables("eth1") == {"NCCL_SOCKET_IFNAME": "=eth1"}
