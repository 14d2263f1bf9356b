"""Tests of what a node knows before Ray starts: rank, head, secret, labels, time limit, arguments of `ray start`."""

import itertools
import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from megarl.cluster.launch import node_world, ray_node
from megarl.cluster.launch.node_world import (
    NodeWorld,
    detect_node_world,
    expand_hostlist,
    find_node_labels,
    parse_labels,
    parse_nvlink_domain,
    parse_time_limit,
)
from megarl.cluster.launch.ray_node import make_interface_environment, make_ray_arguments, make_ray_environment
from megarl.cluster.placement.hardware import object_store_bytes
from megarl.errors import ConfigError
from tests.errors import expect_error

STEP = {
    "SLURM_CLUSTER_NAME": "c",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURMD_NODENAME": "n2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
"""Variables that srun of Slurm 22.05 sets for the second of two tasks."""

HET_STEP = STEP | {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n1",
    "SLURMD_NODENAME": "n1",
}
"""The same for `srun --het-group=0,1` in a job whose first component has the second node."""

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "41001",
}


def test_slurm_step():
    world = detect_node_world(STEP)
    assert (world.rank, world.size, world.host) == (1, 2, "n2")
    assert world.head_hosts == ("n1", "10.0.0.1")
    assert world.nodes == ("n1", "n2")
    assert world.het_group is None


def test_nodes_of_a_heterogeneous_step_are_ordered_by_component():
    world = detect_node_world(HET_STEP)
    assert (world.nodes, world.head_hosts[0], world.het_group) == (("n2", "n1"), "n2", 1)
    one = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    world = detect_node_world(HET_STEP | one)  # a step over one component
    assert (world.nodes, world.het_group) == (("n1",), 1)


def test_batch_script_needs_srun_on_several_nodes():
    batch = {name: value for name, value in STEP.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
    with expect_error(ConfigError, "2", "Slurm", "17", "--ntasks-per-node=1"):
        detect_node_world(batch)
    alone = detect_node_world(batch | {"SLURM_JOB_NUM_NODES": "1"})
    assert (alone.rank, alone.size) == (0, 1)
    with expect_error(ConfigError, "8", "2", "tasks", "nodes"):
        detect_node_world(STEP | {"SLURM_STEP_NUM_TASKS": "8"})


@pytest.mark.parametrize("step_id", [0xFFFFFFFA, 0xFFFFFFFB, 0xFFFFFFFC])
def test_the_shell_of_an_interactive_step_needs_srun_too(step_id):
    # as in `salloc -N2` with LaunchParameters=use_interactive_step: a step of one task on the first node
    shell = STEP | {
        "SLURM_STEP_ID": str(step_id),
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_PROCID": "0",
        "SLURMD_NODENAME": "n1",
    }
    with expect_error(ConfigError, "2", "Slurm", "17", "--ntasks-per-node=1"):
        detect_node_world(shell)
    alone = detect_node_world(shell | {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"})
    assert (alone.rank, alone.size, alone.nodes) == (0, 1, ("n1",))
    step = detect_node_world(shell | {"SLURM_STEP_ID": "3"})  # srun --nodes=1 in the same job
    assert (step.rank, step.size, step.nodes) == (0, 1, ("n1",))


def test_batch_script_of_a_heterogeneous_job_counts_the_nodes_of_all_components():
    batch = {name: value for name, value in HET_STEP.items() if "STEP" not in name} | {"SLURM_JOB_NUM_NODES": "1"}
    with expect_error(ConfigError, "2", "Slurm", "17", "nodes"):
        detect_node_world(batch)


def test_torchrun_environment():
    world = detect_node_world(STEP | TORCHRUN)
    assert (world.rank, world.size, world.head_hosts) == (1, 3, ("10.0.0.7",))
    with expect_error(ConfigError, "1", "4", "--nproc-per-node"):
        detect_node_world(TORCHRUN | {"LOCAL_WORLD_SIZE": "4"})


def test_flags_take_precedence_over_the_environment():
    world = detect_node_world(STEP | TORCHRUN, rank=2, size=4, head="node-a:12345")
    assert (world.rank, world.size, world.head_hosts, world.ports) == (2, 4, ("node-a",), (12345,))
    assert detect_node_world(STEP, head="node-a").head_hosts == ("node-a",)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"size": 2}, "--node-rank from 0 to 1, got None"),
        ({"size": 2, "rank": 2, "head": "a"}, "--node-rank from 0 to 1, got 2"),
        ({"size": 2, "rank": 1}, "needs --head"),
        ({"size": 0}, "at least 1, got 0"),
        ({"rank": 1, "head": "a"}, "needs --nodes"),
        ({"size": 2, "rank": 1, "head": "a:b"}, "HOST or HOST:PORT, got a:b"),
        ({}, "srun --ntasks-per-node=1 .*torchrun .*--nodes N --node-rank R --head HOST"),
    ],
)
def test_insufficient_flags_are_rejected(flags, message):
    with pytest.raises(ConfigError, match=message):
        detect_node_world({}, **flags)


def test_nodes_of_one_start_share_job_and_ports():
    second, first = detect_node_world(STEP), detect_node_world(STEP | {"SLURM_PROCID": "0", "SLURMD_NODENAME": "n1"})
    assert (first.job_id, first.ports) == (second.job_id, second.ports)
    assert len(set(first.ports)) == node_world.NUM_PORTS
    assert all(1024 < port < 32768 for port in first.ports)
    others = (("JOB_ID", "18"), ("STEP_ID", "1"), ("RESTART_COUNT", "1"), ("CLUSTER_NAME", "d"))
    assert len({first.job_id, *(detect_node_world(STEP | {f"SLURM_{k}": v}).job_id for k, v in others)}) == 5
    # torchruns without a run id are distinguished by their port
    assert detect_node_world(TORCHRUN).job_id != detect_node_world(TORCHRUN | {"MASTER_PORT": "41002"}).job_id
    assert detect_node_world(TORCHRUN).job_id == detect_node_world(TORCHRUN | {"RANK": "0"}).job_id


SECRET = "0123456789abcdef"
TWO_NODES = {"rank": 0, "size": 2, "head": "a"}


def secured(environment, *, insecure=False, **flags):
    return node_world.with_secret(detect_node_world(environment, **flags), environment, insecure=insecure)


@pytest.mark.parametrize(("environment", "flags"), [(STEP, {}), (TORCHRUN, {}), ({}, TWO_NODES)])
def test_several_nodes_need_a_secret(environment, flags):
    with expect_error(ConfigError, "MEGARL_LAUNCH_SECRET"):
        secured(environment, **flags)
    assert secured(environment, insecure=True, **flags).secret == ""
    for insecure in (False, True):
        world = secured(environment | {node_world.SECRET_VARIABLE: SECRET}, insecure=insecure, **flags)
        assert world.secret == SECRET
        assert SECRET not in repr(world)


def test_one_node_gets_a_random_secret():
    first, second = (secured({}, size=1) for _ in range(2))
    assert len(first.secret) == 64
    assert first.secret != second.secret
    assert secured({node_world.SECRET_VARIABLE: SECRET}, size=1).secret == SECRET
    with expect_error(ConfigError, "MEGARL_LAUNCH_SECRET", "16", "15"):
        secured({node_world.SECRET_VARIABLE: SECRET[:15]}, **TWO_NODES)


@pytest.mark.parametrize("mode", ["disabled", "Disabled", ""])
@pytest.mark.parametrize("flags", [{"size": 1}, TWO_NODES])
def test_disabled_authentication_of_ray_needs_insecure(flags, mode):
    environment = {"RAY_AUTH_MODE": mode, node_world.SECRET_VARIABLE: SECRET}
    with pytest.raises(ConfigError, match=f"RAY_AUTH_MODE={mode} lets anyone"):
        secured(environment, **flags)
    assert secured(environment, insecure=True, **flags).secret == SECRET
    assert secured(environment | {"RAY_AUTH_MODE": "token"}, **flags).secret == SECRET


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],login", ["n08", "n09", "n10", "n12", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu-[001,003]-ib.x", ["gpu-001-ib.x", "gpu-003-ib.x"]),
    ],
)
def test_expand_hostlist(text, names):
    assert list(expand_hostlist(text)) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "n1,,n2", "n[3-1]", "n[1-2,5-4]", "n[1-2],", ",n1", "n[]"])
def test_invalid_hostlist_is_rejected(text):
    with expect_error(ConfigError, "Slurm", "launch", "cannot"):
        expand_hostlist(text)


FABRIC = """
GPU 00000008:01:00.0
    Product Name                          : NVIDIA GB200
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : 32766
        ClusterUUID                       : 8a5b9e3c-5b8b-4a42-9c6e-0f4b6f1f3b11
        Health
            Bandwidth                     : N/A
    Processes                             : None
"""


def world(**fields):
    return NodeWorld(rank=3, size=4, host="n4", head_hosts=("n1",), head_port=None, job="j", **fields)


def test_labels_are_parsed_as_ray_does():
    from ray._private.label_utils import parse_node_labels_string

    words = ["gpu=h100,rack=7", "my.org/kind=big-one", "megarl.node-rank=3"]
    assert parse_labels(words) == parse_node_labels_string(",".join(words))
    assert parse_labels(words)["my.org/kind"] == "big-one"
    assert parse_labels([]) == {}


@pytest.mark.parametrize("word", ["gpu", "gpu=", "=h100", "a=b=c", "gpu=h 100", "-a=b", "a=b,", "k=" + "v" * 64])
def test_invalid_labels_are_rejected(word):
    with expect_error(ConfigError, "KEY=VALUE"):
        parse_labels([word])


def test_labels_set_by_the_launch():
    assert find_node_labels(world(), None) == {"megarl.node-rank": "3"}
    assert find_node_labels(world(het_group=1), "a.1") == {
        "megarl.node-rank": "3",
        "megarl.het-group": "1",
        "megarl.nvlink-domain": "a.1",
    }


def test_nvlink_domain_of_a_gpu_in_a_fabric():
    domain = parse_nvlink_domain(FABRIC)
    assert domain == "8a5b9e3c-5b8b-4a42-9c6e-0f4b6f1f3b11.32766"
    assert parse_labels([f"d={domain}"]) == {"d": domain}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GPU 1\n    Product Name : NVIDIA H100\n",
        FABRIC.replace("8a5b9e3c-5b8b-4a42-9c6e-0f4b6f1f3b11", "00000000-0000-0000-0000-000000000000"),
        FABRIC.replace("8a5b9e3c-5b8b-4a42-9c6e-0f4b6f1f3b11", "N/A").replace("32766", "N/A"),
    ],
)
def test_no_nvlink_domain_without_a_fabric(text):
    assert parse_nvlink_domain(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("02:00:00", 7200),
        ("1-0", 86400),
        ("1-2:30", 86400 + 9000),
        ("2-03:04:05", 2 * 86400 + 3 * 3600 + 4 * 60 + 5),
    ],
)
def test_all_forms_of_the_manual(text, seconds):
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize("text", ["", "2h", "1:2:3:4", "1-", "-5", "1-2:", "12:00:", "1.5", " 5", "1-2:3:4:5"])
def test_other_forms_are_rejected(text):
    with expect_error(ConfigError, "minutes", "--time"):
        parse_time_limit(text)
    with expect_error(ConfigError, "'0:00'", "--time", "needs"):
        parse_time_limit("0:00")


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
    assert object_store_bytes(max_bytes=ray_node.MAX_OBJECT_STORE_BYTES) == store


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
