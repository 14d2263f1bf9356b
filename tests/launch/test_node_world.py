"""Tests of the detection of ranks and the head from flags, torchrun and Slurm."""

import pytest

from megarl.errors import ConfigError
from megarl.launch.node_world import NUM_PORTS, SECRET_VARIABLE, detect_node_world, expand_hostlist, with_secret

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
    with pytest.raises(ConfigError, match=r"one of the 2 nodes of Slurm job 17; .*srun --ntasks-per-node=1"):
        detect_node_world(batch)
    alone = detect_node_world(batch | {"SLURM_JOB_NUM_NODES": "1"})
    assert (alone.rank, alone.size) == (0, 1)
    with pytest.raises(ConfigError, match="got 8 tasks on 2 nodes"):
        detect_node_world(STEP | {"SLURM_STEP_NUM_TASKS": "8"})


def test_torchrun_environment():
    world = detect_node_world(STEP | TORCHRUN)
    assert (world.rank, world.size, world.head_hosts) == (1, 3, ("10.0.0.7",))
    with pytest.raises(ConfigError, match="--nproc-per-node 1, got 4"):
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
    assert len(set(first.ports)) == NUM_PORTS
    assert all(1024 < port < 32768 for port in first.ports)
    others = (("JOB_ID", "18"), ("STEP_ID", "1"), ("RESTART_COUNT", "1"), ("CLUSTER_NAME", "d"))
    assert len({first.job_id, *(detect_node_world(STEP | {f"SLURM_{k}": v}).job_id for k, v in others)}) == 5
    # torchruns without a run id are distinguished by their port
    assert detect_node_world(TORCHRUN).job_id != detect_node_world(TORCHRUN | {"MASTER_PORT": "41002"}).job_id
    assert detect_node_world(TORCHRUN).job_id == detect_node_world(TORCHRUN | {"RANK": "0"}).job_id


SECRET = "0123456789abcdef"

TWO_NODES = {"rank": 0, "size": 2, "head": "a"}


def secured(environment, *, insecure=False, **flags):
    return with_secret(detect_node_world(environment, **flags), environment, insecure=insecure)


@pytest.mark.parametrize(("environment", "flags"), [(STEP, {}), (TORCHRUN, {}), ({}, TWO_NODES)])
def test_several_nodes_need_a_secret(environment, flags):
    with pytest.raises(ConfigError, match=r"^launch needs a secret in MEGARL_LAUNCH_SECRET, .* or pass --insecure .*$"):
        secured(environment, **flags)
    assert secured(environment, insecure=True, **flags).secret == ""
    for insecure in (False, True):
        world = secured(environment | {SECRET_VARIABLE: SECRET}, insecure=insecure, **flags)
        assert world.secret == SECRET
        assert SECRET not in repr(world)


def test_one_node_gets_a_random_secret():
    first, second = (secured({}, size=1) for _ in range(2))
    assert len(first.secret) == 64
    assert first.secret != second.secret
    assert secured({SECRET_VARIABLE: SECRET}, size=1).secret == SECRET
    with pytest.raises(ConfigError, match="MEGARL_LAUNCH_SECRET needs at least 16 characters, got 15: make one"):
        secured({SECRET_VARIABLE: SECRET[:15]}, **TWO_NODES)


@pytest.mark.parametrize("mode", ["disabled", "Disabled", ""])
@pytest.mark.parametrize("flags", [{"size": 1}, TWO_NODES])
def test_disabled_authentication_of_ray_needs_insecure(flags, mode):
    environment = {"RAY_AUTH_MODE": mode, SECRET_VARIABLE: SECRET}
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


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "n1,,n2"])
def test_invalid_hostlist_is_rejected(text):
    with pytest.raises(ConfigError, match="launch cannot parse the Slurm host list"):
        expand_hostlist(text)
