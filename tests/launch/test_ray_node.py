import itertools
import os
import socket

import psutil
import pytest

from megarl.launch import ray_node
from megarl.launch.ray_node import MOST_STORE, free_port, interface_environment, ray_arguments, ray_environment
from megarl.placement.hardware import store_bytes

GIB = 2**30


def arguments(rank, **kwargs):
    wanted = {
        "node_address": "10.0.0.1",
        "ray_address": "10.0.0.1:21000",
        "cpus": 4,
        "gpus": None,
        "labels": {"a": "b"},
    }
    words = ray_arguments(rank=rank, **(wanted | kwargs))
    return words, dict(itertools.pairwise(words))


def test_head_makes_what_the_others_join():
    words, value = arguments(0)
    assert "--head" in words
    assert value["--port"] == "21000"
    assert "--address" not in words
    assert value["--include-dashboard"] == "false"
    assert "--disable-usage-stats" in words
    words, value = arguments(1, node_address="10.0.0.2", gpus=2, labels={"a": "b", "c": "d"})
    assert value["--address"] == "10.0.0.1:21000"
    assert value["--node-ip-address"] == "10.0.0.2"
    assert (value["--num-cpus"], value["--num-gpus"], value["--labels"]) == ("4", "2", "a=b,c=d")
    assert not {"--head", "--port", "--include-dashboard"} & set(words)


def test_gpus_are_rays_to_find():
    assert "--num-gpus" not in arguments(0)[0]


def test_two_nodes_of_a_machine_share_no_folder(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    folders = [arguments(rank)[1]["--temp-dir"] for rank in range(2)]
    assert len(set(folders)) == 2
    assert all(folder.startswith(f"/elsewhere/ray-{os.getuid()}/") for folder in folders)
    # room for Ray's session and sockets in the 107 characters of a socket's path
    assert all(len(folder) < 40 for folder in folders)


@pytest.mark.parametrize(("free", "store"), [(64 * 2**20, 128 * 2**20), (4 * GIB, GIB), (1024 * GIB, 16 * GIB)])
def test_object_store(monkeypatch, free, store):
    class Shm:
        f_bavail, f_frsize = free // 4096, 4096

    monkeypatch.setattr(ray_node.os, "statvfs", lambda path: Shm)
    assert store_bytes(most=MOST_STORE) == store


def test_free_port():
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("", port))
    assert 20000 <= port < 32768


def test_interface_of_this_machine():
    loopback = next(
        name for name, entries in psutil.net_if_addrs().items() if any(e.address == "127.0.0.1" for e in entries)
    )
    assert interface_environment("127.0.0.1", {}) == {}
    others = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and name != loopback
    }
    for address, name in others.items():
        assert interface_environment(address, {}) == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
        assert interface_environment(address, {"NCCL_SOCKET_IFNAME": "ib"}) == {"GLOO_SOCKET_IFNAME": name}
    assert interface_environment("203.0.113.9", {}) == {}


def test_torchruns_place_stays_with_the_launcher():
    before = {"RANK": "1", "MASTER_ADDR": "a", "TORCHELASTIC_RUN_ID": "x", "RANKING": "y", "PATH": "p"}
    after = ray_environment(before)
    assert {name for name in before if name not in after} == {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}


def test_another_cluster_is_forgotten():
    assert "RAY_ADDRESS" not in ray_environment({"RAY_ADDRESS": "10.0.0.9:6379"})


def test_token_authentication_is_the_users_choice():
    assert ray_environment({})["RAY_AUTH_MODE"] == "disabled"
    assert ray_environment({"RAY_AUTH_MODE": "token"})["RAY_AUTH_MODE"] == "token"
    chosen = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t"}
    assert ray_environment(chosen | {"MEGARL_LAUNCH_SECRET": "s"}).items() >= chosen.items()


def test_a_secret_of_the_run_becomes_rays_token():
    first, second = (ray_environment({"MEGARL_LAUNCH_SECRET": secret}) for secret in "st")
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == len(second["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert "MEGARL_LAUNCH_SECRET" not in first
