"""Fixtures: a tiny model with data, processes that tests share, and commands that end with their test."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end.launched import LaunchedCommand, list_steps
from tests.end_to_end.tiny_world import write_run, write_world
from tests.time_limits import wait_until

if TYPE_CHECKING:
    from tests.end_to_end.components import Components, SharedRanks

Launch = Callable[..., LaunchedCommand]
RunCommand = Callable[..., int]
numbers = itertools.count()
"""Of the groups of ranks in `run_here`, since roles are unique within their processes."""


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `model/`, `chat/` and `data/`."""
    return write_world(tmp_path_factory.mktemp("world"))


@dataclass(frozen=True)
class FinishedRun:
    """A run that has finished undisturbed."""

    command: LaunchedCommand
    exit_code: int
    folder: Path
    leftovers: list[str]

    def steps(self) -> list[dict[str, Any]]:
        return list_steps(self.folder)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture(scope="session")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedRun]:
    """Run `megarl train` on the tiny model to its end."""
    folder = tmp_path_factory.mktemp("train")
    command = LaunchedCommand(folder, "train", write_run(world, folder))
    try:
        wait_until(lambda: command.process.poll() is not None or command.steps_done() >= 5)
        command.find_live_processes()
        exit_code = command.wait()
        command.assert_no_processes_left()
        yield FinishedRun(command, exit_code, folder / "run", command.find_leftovers())
    finally:
        command.end()


@pytest.fixture
def importable_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands import algorithms that are modules of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Return a function that starts a `megarl` command or another program; its run folder is `tmp_path`/run."""
    started: list[LaunchedCommand] = []

    def start(*arguments: str | Path, program: str = "megarl", keeps_ray_address: bool = False) -> LaunchedCommand:
        started.append(LaunchedCommand(tmp_path, *arguments, program=program, keeps_ray_address=keeps_ray_address))
        return started[-1]

    yield start
    for command in started:
        command.end()


@pytest.fixture(scope="package")
def ranks(cluster: None) -> Iterator[SharedRanks]:
    """Start the processes of two Megatron ranks."""
    from tests.end_to_end.components import SharedRanks

    ranks = SharedRanks()
    yield ranks
    ranks.end()


@pytest.fixture(scope="package")
def components(ranks: SharedRanks, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Components]:
    """Start a trainer in the shared ranks, one engine and one rollout worker."""
    from tests.end_to_end.components import make_config, started

    with started(make_config(world, tmp_path_factory.mktemp("pieces")), ranks) as components:
        yield components


@pytest.fixture
def run_here(ranks: SharedRanks, monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    """Return a function that runs a `megarl` command without engines in this process, on the shared ranks.

    The command neither starts a cluster nor an actor for its controller.
    """
    from megarl.cli.main import main
    from megarl.cli.tools import model_conversion, token_scoring
    from megarl.cluster.workers.group import WorkerGroup
    from megarl.config.placement import MAIN_POOL
    from megarl.controller import ray_session, replay, run_stage
    from megarl.controller.actor import Controller
    from megarl.run.remote import build

    def run_on_cluster(config: Any, method: Any, arguments: Any, startup: Any, *, detach: bool) -> Any:
        return method(Controller(startup, time.time()), *arguments)

    def name_role(group: Any, name: str, *arguments: Any) -> None:
        begin(group, f"{name} of group {next(numbers)}", *arguments)

    begin = WorkerGroup.__init__
    monkeypatch.setattr(WorkerGroup, "__init__", name_role)
    monkeypatch.setattr(run_stage, "run_on_cluster", run_on_cluster)
    for name in ("start_cluster", "leave_cluster"):
        monkeypatch.setattr(ray_session, name, lambda *_: None)
    for reserving in (ray_session, build):
        monkeypatch.setattr(reserving, "reserve", lambda _: ranks.pool)
    for reserving in (replay, build):
        monkeypatch.setattr(reserving, "reserve_pools", lambda _, pools: dict.fromkeys({*pools, MAIN_POOL}, ranks.pool))
    for starting in (model_conversion, token_scoring, replay, build):
        monkeypatch.setattr(starting, "make_rank_processes", lambda *_: ranks)
    return lambda *arguments: main([str(argument) for argument in arguments])


@pytest.fixture
def start_head(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Return a function that starts a Ray cluster, with token authentication, which must outlive the test."""
    heads: list[LaunchedCommand] = []

    def start(*options: str) -> LaunchedCommand:
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "a-token-that-every-node-has")
        common = ["--head", "--block", "--port=0", "--num-cpus=4", "--disable-usage-stats"]
        heads.append(launch("start", *common, "--object-store-memory=268435456", *options, program="ray"))
        return heads[-1]

    yield start
    assert all(head.process.poll() is None for head in heads)


@pytest.fixture
def head(start_head: Launch, monkeypatch: pytest.MonkeyPatch) -> LaunchedCommand:
    """Start a Ray cluster and set RAY_ADDRESS to it."""
    head = start_head("--include-dashboard=false")
    head.wait_until(lambda: re.search(r"--address='([^']+)'", head.stdout))
    found = re.search(r"--address='([^']+)'", head.stdout)
    assert found is not None
    monkeypatch.setenv("RAY_ADDRESS", found[1])
    return head
