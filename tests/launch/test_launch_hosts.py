"""`megarl launch` on hosts of their own, 20 ms apart."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.launched import name_of, wait_until
from tests.end_to_end.test_repeat import REPEATED
from tests.end_to_end.tiny_world import write_run
from tests.launch.conftest import MakeHosts
from tests.launch.hosts import Command, Host

DELAY = 0.02

JOIN_TIMEOUT = 3

NODE_TIMEOUT = 5.0

END_SECONDS = 30.0
"""For a command and Ray to end in order."""

TRAINER, ENGINE = "ray::Shell", "sglang::scheduler"

TOGETHER: dict[str, Any] = {
    "placement": {"nodes": 2, "slots_per_node": 1},
    "rollout": {"replicas": 2, "max_new_tokens": 12},
}
"""On each host a trainer rank and an engine."""

APART: dict[str, Any] = {"placement": {"slots_per_node": 2, "pools": {"engines": {}}, "rollout": {"pool": "engines"}}}
"""The trainer on one host, the engine on the other."""


def by_hand(hosts: Sequence[Host], head: str, *arguments: object, ranks: Sequence[int] = (0, 1)) -> list[Command]:
    """Launched without torchrun, on those hosts that have one of `ranks`."""
    size = ("--nodes", len(hosts), "--head", head)
    return [hosts[rank].start("megarl", "launch", *size, "--node-rank", rank, *arguments) for rank in ranks]


def rows(folder: Path) -> list[dict[str, float]]:
    """What the training steps have written."""
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [row for row in map(json.loads, lines) if "loss" in row]


def wait_for_step(step: int, folder: Path, command: Command, seconds: float) -> None:
    """Block until the run in `folder` has finished it; the command must go on until then."""
    wait_until(lambda: len(rows(folder)) >= step or command.process.poll() is not None, seconds)
    assert len(rows(folder)) >= step, command.stdout + command.stderr
    assert command.process.poll() is None, command.stdout + command.stderr


def kinds(host: Host) -> set[str]:
    """Of the processes that do a run's work."""
    names = [name_of(process) for process in host.processes()]
    return {kind for kind in (TRAINER, ENGINE) if any(name.startswith(kind) for name in names)}


def test_two_hosts_train_together_until_one_is_cut_off(make_hosts: MakeHosts, world: Path, tmp_path: Path) -> None:
    hosts = make_hosts(delay=DELAY)
    a, b = hosts
    config = write_run(world, tmp_path, **TOGETHER)
    on_a, on_b = by_hand([a, b], a.name, "--node-timeout", NODE_TIMEOUT, "train", config)
    wait_for_step(2, tmp_path, on_a, 120)
    assert kinds(a) == kinds(b) == {TRAINER, ENGINE}
    hosts.cut_off(b)
    assert on_a.wait(NODE_TIMEOUT + END_SECONDS) == 1
    assert on_b.wait(END_SECONDS) == 1
    lost = f"error: node b ({b.address}, rank 1): not heard of for {NODE_TIMEOUT:g} s; the run has been ended\n"
    assert lost in on_a.stderr
    assert f"the head, {a.address}: not heard of for {NODE_TIMEOUT:g} s; this node has ended its part\n" in on_b.stderr
    for host in hosts:
        host.assert_nothing_runs(5)


def test_a_head_that_cannot_be_reached_is_one_sentence(make_hosts: MakeHosts) -> None:
    """One that is cut off, an address that nobody has, and a machine where nobody listens."""
    hosts = make_hosts()
    a, b = hosts
    hosts.cut_off(a)
    begun = time.monotonic()
    places = (a.address, "10.77.0.9", "localhost")
    options = ("--join-timeout", JOIN_TIMEOUT, "train", "none.yaml")
    commands = [by_hand([a, b], place, *options, ranks=[1])[0] for place in places]
    for place, command in zip(places, commands, strict=True):
        assert command.wait(20) == 1
        sentence = rf"error: node b \(rank 1\) found no head within {JOIN_TIMEOUT} s, at {place}, ports \d+-\d+: .+\n"
        assert re.fullmatch(sentence, command.stderr), command.stderr
    assert time.monotonic() - begun >= JOIN_TIMEOUT
    b.assert_nothing_runs(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "alone", "placed"),
    [
        (TOGETHER, TOGETHER | {"placement": {"slots_per_node": 2}}, [{TRAINER, ENGINE}, {TRAINER, ENGINE}]),
        (APART, APART, [{ENGINE}, {TRAINER}]),
    ],
    ids=["together", "apart"],
)
def test_two_hosts_have_the_losses_of_one(
    sections: dict[str, Any],
    alone: dict[str, Any],
    placed: list[set[str]],
    make_hosts: MakeHosts,
    world: Path,
    tmp_path: Path,
) -> None:
    """To the last bit, and so the engines had the same weights at every step."""
    hosts = make_hosts(delay=DELAY)
    first, _ = hosts
    steps = ("--set", "trainer.steps=4", "data.eval_path=null")
    on_a, on_b = hosts.torchrun("megarl", "launch", "train", write_run(world, tmp_path, **sections), *steps)
    wait_for_step(1, tmp_path, on_a, 150)
    assert sorted(map(kinds, hosts), key=sorted) == sorted(placed, key=sorted)
    assert on_a.wait(120) == 0, on_a.stderr
    assert on_b.wait(END_SECONDS) == 0, on_b.stderr
    seen = rows(tmp_path)
    assert len(seen) == 4
    for host in hosts:
        host.assert_nothing_runs(5)
    first.run("megarl", "train", write_run(world, tmp_path, **alone), *steps, seconds=150)
    assert [{name: row[name] for name in REPEATED} for row in seen] == [
        {name: row[name] for name in REPEATED} for row in rows(tmp_path)
    ]
