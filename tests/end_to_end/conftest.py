"""Fixtures: a tiny model with data for the session, and commands that end with their test."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end.launched import LaunchedCommand, list_steps
from tests.end_to_end.tiny_world import write_run, write_world

if TYPE_CHECKING:
    from tests.end_to_end.components import Components

Launch = Callable[..., LaunchedCommand]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `model/` and `data/`."""
    return write_world(tmp_path_factory.mktemp("world"))


@dataclass(frozen=True)
class FinishedRun:
    """A run that has finished undisturbed."""

    command: LaunchedCommand
    exit_code: int
    folder: Path
    leftovers: list[str]

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics, one row per step."""
        return list_steps(self.folder)

    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return content


@pytest.fixture(scope="session")
def fifty_steps(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedRun]:
    """Run `megarl train` on the tiny model to its end."""
    folder = tmp_path_factory.mktemp("train")
    command = LaunchedCommand(folder, "train", write_run(world, folder))
    try:
        command.wait_for_step(5)
        exit_code = command.wait()
        command.assert_no_processes_left()
        yield FinishedRun(command, exit_code, folder / "run", command.find_leftovers())
    finally:
        command.end()


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
def components(cluster: None, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Components]:
    """Start two data-parallel trainer ranks, one engine and one rollout worker."""
    from tests.end_to_end.components import build, make_config

    components = build(make_config(world, tmp_path_factory.mktemp("pieces")))
    yield components
    components.close()


@pytest.fixture
def head(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchedCommand]:
    """Start a Ray cluster that outlives the commands and set RAY_ADDRESS to it."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-token-that-every-node-has")
    options = ["--head", "--block", "--port=0", "--num-cpus=4", "--include-dashboard=false", "--disable-usage-stats"]
    head = launch("start", *options, "--object-store-memory=268435456", program="ray")
    head.wait_until(lambda: re.search(r"--address='([^']+)'", head.stdout))
    found = re.search(r"--address='([^']+)'", head.stdout)
    assert found is not None
    monkeypatch.setenv("RAY_ADDRESS", found[1])
    yield head
    assert head.process.poll() is None  # the cluster outlives the run
