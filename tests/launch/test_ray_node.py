"""Tests of the arguments and environment of `ray start`."""

import itertools
import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from megarl.launch import ray_node
from megarl.launch.ray_node import (
    MAX_OBJECT_STORE_BYTES,
    make_interface_environment,
    make_ray_arguments,
    make_ray_environment,
)
from megarl.placement.hardware import object_store_bytes
from megarl.process import ports

GIB = 2**30


def make_arguments(rank, **kwargs):
    defaults = {
        "node_address": "10.0.0.1",
        "ray_address": "10.0.0.1:21000",
        "cpus": 4,
        "gpus": None,
        "labels": {"a": "b"},
    }
    words = make_ray_arguments(rank=rank, **(defaults | kwargs))
    return words, dict(itertools.pairwise(words))


def test_head_starts_the_cluster_that_others_join():
    words, value = make_arguments(0)
    assert "--head" in words
    assert value["--port"] == "21000"
    assert "--address" not in words
    assert value["--include-dashboard"] == "false"
    assert "--disable-usage-stats" in words
    words, value = make_arguments(1, node_address="10.0.0.2", gpus=2, labels={"a": "b", "c": "d"})
    assert value["--address"] == "10.0.0.1:21000"
    assert value["--node-ip-address"] == "10.0.0.2"
    assert (value["--num-cpus"], value["--num-gpus"], value["--labels"]) == ("4", "2", "a=b,c=d")
    assert not {"--head", "--port", "--include-dashboard"} & set(words)
    # the number of GPUs is left to Ray by default
    assert "--num-gpus" not in make_arguments(0)[0]


def test_two_nodes_on_a_machine_have_separate_folders(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    folders = [make_arguments(rank)[1]["--temp-dir"] for rank in range(2)]
    assert len(set(folders)) == 2
    assert all(folder.startswith(f"/elsewhere/ray-{os.getuid()}/") for folder in folders)
    # leaves room for Ray's session and sockets: a socket path has at most 107 characters
    assert all(len(folder) < 40 for folder in folders)


@pytest.mark.parametrize(("free", "store"), [(64 * 2**20, 128 * 2**20), (4 * GIB, GIB), (1024 * GIB, 16 * GIB)])
def test_object_store_size(monkeypatch, free, store):
    class Shm:
        f_bavail, f_frsize = free // 4096, 4096

    monkeypatch.setattr(ray_node.os, "statvfs", lambda path: Shm)
    assert object_store_bytes(max_bytes=MAX_OBJECT_STORE_BYTES) == store


def test_unused_port_is_below_those_of_outgoing_connections(tmp_path, monkeypatch):
    file = tmp_path / "ip_local_port_range"
    file.write_text("20003\t60999\n")
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", file)
    monkeypatch.setattr(ports, "is_port_free", lambda port: port != 20001)
    assert {ports.find_unused_port() for _ in range(50)} <= {20000, 20002}


def test_interface_environment(monkeypatch):
    def entries(*addresses):
        return [SimpleNamespace(address=address, family=socket.AF_INET) for address in addresses]

    interfaces = {"lo": entries("127.0.0.1"), "eth0": entries("10.0.0.1"), "eth1": entries("10.1.0.1", "10.1.0.2")}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    assert make_interface_environment("127.0.0.1", {}) == {}
    assert make_interface_environment("10.1.0.2", {}) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert make_interface_environment("10.0.0.1", {"NCCL_SOCKET_IFNAME": "ib"}) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert make_interface_environment("203.0.113.9", {}) == {}


def test_environment_of_ray_lacks_what_is_of_the_launcher():
    before = {"RANK": "1", "MASTER_ADDR": "a", "TORCHELASTIC_RUN_ID": "x", "RANKING": "y", "PATH": "p"}
    excluded = {"RAY_ADDRESS": "10.0.0.9:6379", "MEGARL_LAUNCH_SECRET": "s"}
    after = make_ray_environment(before | excluded, has_secret=True)
    assert {name for name in before if name not in after} == {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
    assert not excluded.keys() & after.keys()
    assert "s" not in after.values()


def test_ray_needs_a_token_if_the_nodes_have_a_secret():
    assert make_ray_environment({}, has_secret=True)["RAY_AUTH_MODE"] == "token"
    assert make_ray_environment({}, has_secret=False)["RAY_AUTH_MODE"] == "disabled"
    assert make_ray_environment({"RAY_AUTH_MODE": "token"}, has_secret=False)["RAY_AUTH_MODE"] == "token"
