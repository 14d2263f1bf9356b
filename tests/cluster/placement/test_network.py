"""Choice of the network interface."""

import socket
import sys

import psutil
import pytest

from megarl.cluster.placement.hardware import interface_to, interface_variables
from megarl.errors import ConfigError
from tests.cluster.launch.hosts import Hosts
from tests.errors import expect_error


def test_own_addresses_are_reached_over_their_interfaces():
    owners = {}  # containers' bridges may have the same address
    is_up = {name: stats.isup for name, stats in psutil.net_if_stats().items()}
    for name, found in psutil.net_if_addrs().items():
        for address in (a.address for a in found if a.family == socket.AF_INET and is_up.get(name)):
            owners.setdefault(address, []).append(name)
    for address, names in owners.items():
        assert interface_to(address) == (address, names[0])
    assert interface_to("127.3.2.1")[1] == owners["127.0.0.1"][0]


def test_unreachable_address_is_named(monkeypatch):
    def resolve(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)  # some name servers answer for all names
    with expect_error(ConfigError, "no-such-host.invalid"):
        interface_to("no-such-host.invalid")


def test_variables_set_by_the_user_are_kept():
    assert interface_variables("eth1", {}) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert interface_variables("eth1", {"GLOO_SOCKET_IFNAME": "eth0"}) == {"NCCL_SOCKET_IFNAME": "=eth1"}


RANK = """
import os, sys
from megarl.cluster.placement.hardware import use_network_to_master

class Store(dict):
    set, get = dict.__setitem__, lambda self, key: self[key].encode()

# the entries of the three torchrun ranks on two hosts, without that of this rank
store = Store({f"megarl/master/{rank}": seen for rank, seen in enumerate(sys.argv[2:])})
use_network_to_master(store, int(sys.argv[1]), 3)
print(store[f"megarl/master/{sys.argv[1]}"], os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
"""


def test_ranks_use_the_network_that_connects_their_hosts(tmp_path):
    """On host a, the name a resolves to the loopback, which is only right if all ranks are on that host."""

    def interface_used(host, rank, *seen, master="a"):
        return host.run("env", f"MASTER_ADDR={master}", sys.executable, "-c", RANK, rank, *seen).split()

    with Hosts(2, tmp_path) as hosts:
        a, b = hosts
        assert interface_used(b, 2, "", "", "") == ["10.77.0.1", "eth0", "=eth0"]
        assert interface_used(a, 0, "127.0.1.1", "127.0.1.1", "10.77.0.1") == ["127.0.1.1", "eth0", "=eth0"]
        assert interface_used(a, 1, "127.0.1.1", "127.0.1.1", "127.0.1.1") == ["127.0.1.1", "lo", "=lo"]
        assert interface_used(a, 0, "", "", "", master="10.77.0.1") == ["10.77.0.1", "eth0", "=eth0"]
        message = r"ConfigError: b has no route to 192\.0\.2\.1: Network is unreachable"
        with pytest.raises(AssertionError, match=message):
            interface_used(b, 0, "", "", "", master="192.0.2.1")
