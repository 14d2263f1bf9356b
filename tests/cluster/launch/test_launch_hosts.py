"""Simulated hosts, and `megarl launch` and commands under torchrun on them."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.reshard.analysis.scenario import STRATEGIES
from tests.cluster.launch.conftest import PATIENT
from tests.cluster.launch.hosts import Command, Host, Hosts
from tests.end_to_end.launched import COMPARED_METRICS, last_step, list_steps, process_title
from tests.end_to_end.tiny_world import write_run, write_sft
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS, wait_until

SERVER = """
import hashlib, socket
with socket.create_server(("", 7000)) as server:
    print("listening", flush=True)
    while True:
        one, _ = server.accept()
        with one, one.makefile("rb") as file:
            one.sendall(hashlib.md5(file.read()).hexdigest().encode())
"""

CLIENT = """
import hashlib, os, socket, sys
one = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[3]))
content = os.urandom(int(sys.argv[2]))
one.sendall(content)
one.shutdown(socket.SHUT_WR)
assert one.makefile().read() == hashlib.md5(content).hexdigest()
"""


def send_bytes(host: Host, server: str, num_bytes: int, timeout: float = HANG_SECONDS) -> None:
    """Send bytes to the server and check their digest."""
    host.run(sys.executable, "-S", "-c", CLIENT, server, str(num_bytes), str(timeout))


def check_cut_off(hosts: Hosts, a: Host, b: Host) -> None:
    """A host that is cut off is unreachable until it rejoins."""
    hosts.cut_off(b)
    assert "state UP" in b.run("ip", "link", "show", "eth0")
    with expect_error(AssertionError, "timed"):
        send_bytes(a, b.address, 10, 0.3)
    hosts.rejoin(b)
    send_bytes(a, b.address, 10)


def test_hosts_share_only_network_and_files(hosts, tmp_path):
    a, b = hosts
    server = b.start(sys.executable, "-S", "-c", SERVER)
    server.wait_for_output("listening")
    assert a.run("hostname") == "a\n"
    send_bytes(a, "b", 5_000_000)
    with pytest.raises(AssertionError, match="ConnectionRefusedError"):
        send_bytes(a, "127.0.0.1", 1)
    assert a.run("getent", "hosts", "a", "b").split() == ["127.0.1.1", "a", "10.77.0.2", "b"]
    for folder in ("/tmp", "/dev/shm"):
        a.run("touch", f"{folder}/mine")
        assert b.run("find", folder, "-name", "mine") == ""
    a.run("touch", tmp_path / "ours")
    assert b.run("ls", tmp_path / "ours") == f"{tmp_path / 'ours'}\n"
    assert not (Path("/tmp") / "mine").exists()
    assert [p.name() for p in b.processes()] == ["python"]
    assert not a.processes()
    assert "sleep infinity" in b.run("ps", "ax")
    assert SERVER not in a.run("ps", "ax")
    check_cut_off(hosts, a, b)
    server.send(2)
    assert server.wait() != 0


def find_sleep_arguments(host: Host) -> list[str]:
    return sorted(p.cmdline()[-1] for p in host.processes() if p.name() == "sleep")


def test_no_process_outlives_its_host(tmp_path):
    with Hosts(1, tmp_path) as hosts:
        (a,) = hosts
        a.start("sh", "-c", "trap '' HUP INT TERM; setsid sleep 1000 & sleep 1001")
        a.start("sleep", "1002")
        assert wait_until(lambda: find_sleep_arguments(a) == ["1000", "1001", "1002"]), a.processes()
        running = a.processes()
    psutil.wait_procs(running, HANG_SECONDS)
    a.assert_nothing_runs(0)


SECRET = "the secret of all nodes of these tests"
JOIN_TIMEOUT = 3
TRAINER, ENGINE = "ray::WorkerHost", "sglang::scheduler"
LAUNCH_OPTIONS = ("--cpus", 2, "--join-timeout", HANG_SECONDS, "--node-timeout", HANG_SECONDS)
"""Two slots however many cores this machine has, and much patience."""

COLOCATED: dict[str, Any] = {
    "placement": {"nodes": 2, "slots_per_node": 1, **PATIENT},
    "rollout": {"replicas": 2, "max_new_tokens": 12},
}
"""Each host has a trainer rank and an engine."""

DISAGGREGATED: dict[str, Any] = {
    "placement": {"slots_per_node": 2, "pools": {"engines": {}}, "rollout": {"pool": "engines"}, **PATIENT}
}
"""One host has the trainer, the other the engine."""

SPANNING: dict[str, Any] = {
    "placement": {
        "slots_per_node": 1,
        "pools": {"engines": {"nodes": 2, "slots_per_node": 1}},
        "rollout": {"pool": "engines"},
        **PATIENT,
    },
    "rollout": {"tp": 2, "max_new_tokens": 12},
}
"""One host has the trainer; the engine has a tensor-parallel rank on each."""
ENGINE_ON_ONE_HOST = SPANNING | {"placement": SPANNING["placement"] | {"pools": {"engines": {"slots_per_node": 2}}}}


def launch_by_hand(hosts, head: str, *arguments: object, ranks=(0, 1), program=("megarl",)) -> list[Command]:
    """Start `megarl launch` without torchrun on the hosts of the given ranks; `program`: what stands for megarl."""
    command = (*program, "launch", "--nodes", len(hosts), "--head", head)
    return [hosts[rank].start(*command, "--node-rank", rank, *arguments, MEGARL_LAUNCH_SECRET=SECRET) for rank in ranks]


def wait_for_step(step: int, folder: Path, command: Command) -> None:
    """Block until the run in `folder` has finished `step`; the command must still be running."""
    wait_until(lambda: last_step(folder / "run") >= step or command.process.poll() is not None)
    assert last_step(folder / "run") >= step, command.stdout + command.stderr
    assert command.process.poll() is None, command.stdout + command.stderr


def find_process_kinds(host: Host) -> set[str]:
    """Return the kinds of worker processes on the host."""
    names = [process_title(process) for process in host.processes()]
    return {kind for kind in (TRAINER, ENGINE) if any(name.startswith(kind) for name in names)}


def test_two_hosts_train_until_one_is_cut_off(hosts, world, tmp_path):
    a, b = hosts
    config, jump_file = write_run(world, tmp_path, **DISAGGREGATED), tmp_path / "jump"
    program = ("python", "-m", "tests.cluster.launch.skewed_clock", jump_file)
    on_a, on_b = launch_by_hand([a, b], a.name, *LAUNCH_OPTIONS, "train", config, program=program)
    wait_for_step(1, tmp_path, on_a)
    assert sorted(map(find_process_kinds, hosts), key=sorted) == [{TRAINER}, {ENGINE}]
    hosts.cut_off(b)
    jump_file.touch()
    assert on_a.wait() == 1
    assert on_b.wait() == 1
    silence = f"no message for {HANG_SECONDS:g} s"
    assert f"error: node b ({b.address}, rank 1): {silence}; the run was aborted\n" in on_a.stderr
    assert f"lost the head {a.address}: {silence}; this node was stopped\n" in on_b.stderr
    for host in hosts:
        host.assert_nothing_runs()


def test_unreachable_head_gives_a_one_line_error(hosts):
    """The head is cut off, has an address that no host has, or is a host where nobody listens."""
    a, b = hosts
    hosts.cut_off(a)
    places = (a.address, "10.77.0.9", "localhost")
    options = ("--join-timeout", JOIN_TIMEOUT, "train", "none.yaml")
    commands = [launch_by_hand([a, b], place, *options, ranks=[1])[0] for place in places]
    for place, command in zip(places, commands, strict=True):
        assert command.wait() == 1
        error = (
            rf"error: node b \(rank 1\) found no head within {JOIN_TIMEOUT} s at {place}, ports \d+-\d+; last error: .+"
        )
        assert re.fullmatch(error + "\n", command.stderr), command.stderr
    b.assert_nothing_runs()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "single_host_sections", "placed"),
    [
        (COLOCATED, COLOCATED | {"placement": {"slots_per_node": 2}}, [{TRAINER, ENGINE}, {TRAINER, ENGINE}]),
        (DISAGGREGATED, DISAGGREGATED, [{ENGINE}, {TRAINER}]),
        (SPANNING, ENGINE_ON_ONE_HOST, [{ENGINE}, {TRAINER, ENGINE}]),
    ],
    ids=["colocated", "disaggregated", "engine over both hosts"],
)
def test_two_hosts_have_the_same_losses_as_one(sections, single_host_sections, placed, hosts, world, tmp_path):
    """Losses are bitwise equal, so the engines had the same weights at every step."""
    first, _ = hosts
    steps = ("--set", "trainer.steps=4", "data.eval_path=null")
    config = write_run(world, tmp_path, **sections)
    command = ("megarl", "launch", *LAUNCH_OPTIONS, "train", config, *steps)
    on_a, on_b = hosts.torchrun(*command, MEGARL_LAUNCH_SECRET=SECRET)
    wait_for_step(1, tmp_path, on_a)
    assert sorted(map(find_process_kinds, hosts), key=sorted) == sorted(placed, key=sorted)
    assert on_a.wait() == 0, on_a.stderr
    assert on_b.wait() == 0, on_b.stderr
    seen = list_steps(tmp_path / "run")
    assert len(seen) == 4
    for host in hosts:
        host.assert_nothing_runs()
    first.run("megarl", "train", write_run(world, tmp_path, **single_host_sections), *steps)
    assert [{name: row[name] for name in COMPARED_METRICS} for row in seen] == [
        {name: row[name] for name in COMPARED_METRICS} for row in list_steps(tmp_path / "run")
    ]


TIMED = ("tokens_per_second", "time/step_seconds")


def read_metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMED} for line in lines]


@pytest.mark.slow
def test_sft_on_two_hosts_matches_one_host(hosts, world, tmp_path):
    sections: dict[str, Any] = {"trainer": {"steps": 3, "batch_size": 8, "parallel": {"pp": 2}}}
    for command in hosts.torchrun("megarl", "sft", write_sft(world, tmp_path, **sections), local_addr=False):
        assert command.wait() == 0, command.stderr
    seen = read_metrics(tmp_path)
    a, b = hosts
    assert not b.processes()
    standalone = ("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "megarl", "sft")
    a.run(*standalone, write_sft(world, tmp_path, **sections))
    assert len(seen) == 3
    assert seen == read_metrics(tmp_path)


@pytest.mark.slow
def test_reshard_benchmark_on_two_hosts(hosts):
    options = ("--model=synthetic:1", "--train=tp=2", "--gen=tp=1", "--nodes=2", "--repeats=3", "--json")
    writer, other = hosts.torchrun("benchmarks.reshard", *options)
    assert writer.wait() == 0, writer.stderr
    assert other.wait() == 0, other.stderr
    reports = [json.loads(line) for line in (writer.stdout + other.stdout).splitlines()]
    reports = [report for report in reports if "left_out" not in report]  # contenders that this machine lacks
    assert {report["strategy"] for report in reports} >= set(STRATEGIES), writer.stderr
    assert all(report["mismatched_bytes"] == 0 for report in reports)
    assert all(report["sync_seconds_p50"] > 0 for report in reports)
