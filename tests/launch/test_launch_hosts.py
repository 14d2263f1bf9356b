"""`megarl launch` on simulated hosts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.launched import process_title
from tests.end_to_end.test_repeat import COMPARED_METRICS
from tests.end_to_end.tiny_world import write_run
from tests.launch.conftest import PATIENT
from tests.launch.hosts import Command, Host, Hosts
from tests.time_limits import HANG_SECONDS, wait_until

SECRET = "the secret of all nodes of these tests"

JOIN_TIMEOUT = 3

TRAINER, ENGINE = "ray::WorkerHost", "sglang::scheduler"

TIMEOUTS = ("--join-timeout", HANG_SECONDS, "--node-timeout", HANG_SECONDS)

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


def launch_by_hand(
    hosts: Sequence[Host],
    head: str,
    *arguments: object,
    ranks: Sequence[int] = (0, 1),
    program: Sequence[object] = ("megarl",),
) -> list[Command]:
    """Start `megarl launch` without torchrun on the hosts of the given ranks; `program`: what stands for megarl."""
    command = (*program, "launch", "--nodes", len(hosts), "--head", head)
    return [hosts[rank].start(*command, "--node-rank", rank, *arguments, MEGARL_LAUNCH_SECRET=SECRET) for rank in ranks]


def read_training_rows(folder: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.jsonl that training steps have written."""
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [row for row in map(json.loads, lines) if "loss" in row]


def wait_for_step(step: int, folder: Path, command: Command) -> None:
    """Block until the run in `folder` has finished `step`; the command must still be running."""
    wait_until(lambda: len(read_training_rows(folder)) >= step or command.process.poll() is not None)
    assert len(read_training_rows(folder)) >= step, command.stdout + command.stderr
    assert command.process.poll() is None, command.stdout + command.stderr


def find_process_kinds(host: Host) -> set[str]:
    """Return the kinds of worker processes on the host."""
    names = [process_title(process) for process in host.processes()]
    return {kind for kind in (TRAINER, ENGINE) if any(name.startswith(kind) for name in names)}


def test_two_hosts_train_until_one_is_cut_off(hosts: Hosts, world: Path, tmp_path: Path) -> None:
    a, b = hosts
    config, jump_file = write_run(world, tmp_path, **DISAGGREGATED), tmp_path / "jump"
    program = ("python", "-m", "tests.launch.skewed_clock", jump_file)
    on_a, on_b = launch_by_hand([a, b], a.name, *TIMEOUTS, "train", config, program=program)
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


def test_unreachable_head_gives_a_one_line_error(hosts: Hosts) -> None:
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
def test_two_hosts_have_the_same_losses_as_one(
    sections: dict[str, Any],
    single_host_sections: dict[str, Any],
    placed: list[set[str]],
    hosts: Hosts,
    world: Path,
    tmp_path: Path,
) -> None:
    """Losses are bitwise equal, so the engines had the same weights at every step."""
    first, _ = hosts
    steps = ("--set", "trainer.steps=4", "data.eval_path=null")
    config = write_run(world, tmp_path, **sections)
    command = ("megarl", "launch", *TIMEOUTS, "train", config, *steps)
    on_a, on_b = hosts.torchrun(*command, MEGARL_LAUNCH_SECRET=SECRET)
    wait_for_step(1, tmp_path, on_a)
    assert sorted(map(find_process_kinds, hosts), key=sorted) == sorted(placed, key=sorted)
    assert on_a.wait() == 0, on_a.stderr
    assert on_b.wait() == 0, on_b.stderr
    seen = read_training_rows(tmp_path)
    assert len(seen) == 4
    for host in hosts:
        host.assert_nothing_runs()
    first.run("megarl", "train", write_run(world, tmp_path, **single_host_sections), *steps)
    assert [{name: row[name] for name in COMPARED_METRICS} for row in seen] == [
        {name: row[name] for name in COMPARED_METRICS} for row in read_training_rows(tmp_path)
    ]
