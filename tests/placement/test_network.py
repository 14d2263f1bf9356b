from __future__ import annotations

import socket
import sys

import psutil
import pytest

from megarl.errors import ConfigError
from megarl.placement.network import interface_to, interface_variables
from tests.launch.hosts import Hosts, missing


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


def test_what_the_user_has_set_stays():
    assert interface_variables("eth1", {}) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert interface_variables("eth1", {"GLOO_SOCKET_IFNAME": "eth0"}) == {"NCCL_SOCKET_IFNAME": "=eth1"}


RANK = """
import os, sys
from megarl.placement.network import use_network_to_master
from tests.launch.hosts import Hosts, missing

class Store(dict):
    set, get = dict.__setitem__, lambda self, key: self[key].encode()

# as torchrun's three ranks on two hosts note it, but for this one
store = Store({f"megarl/master/{rank}": seen for rank, seen in enumerate(sys.argv[2:])})
use_network_to_master(store, int(sys.argv[1]), 3)
print(store[f"megarl/master/{sys.argv[1]}"], os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
"""


def test_ranks_use_the_network_that_joins_their_hosts(tmp_path):
    """On a, the name a is the loopback; so it is where all ranks are on one host, and there it may stay."""
    lacking = missing()
    if lacking is not None:
        pytest.skip(lacking)

    def use(host, rank, *seen, master="a"):
        return host.run("env", f"MASTER_ADDR={master}", sys.executable, "-c", RANK, rank, *seen).split()

    with Hosts(2, tmp_path) as hosts:
        a, b = hosts
        assert use(b, 2, "", "", "") == ["10.77.0.1", "eth0", "=eth0"]
        assert use(a, 0, "127.0.1.1", "127.0.1.1", "10.77.0.1") == ["127.0.1.1", "eth0", "=eth0"]
        assert use(a, 1, "127.0.1.1", "127.0.1.1", "127.0.1.1") == ["127.0.1.1", "lo", "=lo"]
        assert use(a, 0, "", "", "", master="10.77.0.1") == ["10.77.0.1", "eth0", "=eth0"]
        with pytest.raises(
            AssertionError, match=r"ConfigError: b finds no way to 192\.0\.2\.1: Network is unreachable"
        ):
            use(b, 0, "", "", "", master="192.0.2.1")
