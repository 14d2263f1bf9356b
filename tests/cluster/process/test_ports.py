"""Unused ports of this node."""

import random
import socket

import pytest

from megarl.cluster.process import ports
from megarl.errors import WorkerError


def test_unused_port_is_below_those_of_outgoing_connections(tmp_path, monkeypatch):
    file = tmp_path / "ip_local_port_range"
    file.write_text("20003\t60999\n")
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", file)
    monkeypatch.setattr(ports, "is_port_free", lambda port: port != 20001)
    assert {ports.find_unused_port() for _ in range(50)} <= {20000, 20002}


def test_unused_ports_differ_and_are_not_in_use(tmp_path, monkeypatch):
    assert len(set(ports.find_unused_ports(4))) == 4
    with socket.socket() as server:
        server.bind(("", 0))
        used = server.getsockname()[1]
        file = tmp_path / "ip_local_port_range"
        file.write_text(f"{used + 1}\t60999\n")
        monkeypatch.setattr(ports, "EPHEMERAL_RANGE", file)
        monkeypatch.setattr(ports, "LOWEST_PORT", used)
        with pytest.raises(WorkerError, match=rf"has no 1 free ports from {used} to {used}$"):
            ports.find_unused_ports(1)
    assert ports.find_unused_ports(1) == [used]


def test_processes_with_the_same_seed_choose_other_ports():
    chosen = []
    for _ in range(2):
        random.seed(7)
        chosen.append(ports.find_unused_ports(4))
    assert chosen[0] != chosen[1]
