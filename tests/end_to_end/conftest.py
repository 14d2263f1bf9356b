"""One tiny world for the session, and commands that are ended with their test."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.components import Pieces, build, make_config
from tests.end_to_end.launched import Launched, list_steps
from tests.end_to_end.tiny_world import write_run, write_world

Launch = Callable[..., Launched]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` and `data/`."""
    return write_world(tmp_path_factory.mktemp("world"))


@dataclass(frozen=True)
class Finished:
    """A run that nothing has happened to."""

    command: Launched
    exit_code: int
    folder: Path
    leftovers: list[str]

    def steps(self) -> list[dict[str, Any]]:
        """One row a step."""
        return list_steps(self.folder)

    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return content


@pytest.fixture(scope="session")
def fifty_steps(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """`megarl train` on the tiny world, to its end."""
    folder = tmp_path_factory.mktemp("train")
    command = Launched(folder, "train", write_run(world, folder))
    try:
        command.wait_for_step(5)
        exit_code = command.wait(180)
        command.assert_nothing_lives(5)
        yield Finished(command, exit_code, folder / "run", command.leftovers())
    finally:
        command.end()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts a `megarl` command, or another program; its run's folder is `tmp_path`/run."""
    started: list[Launched] = []

    def start(*arguments: str | Path, program: str = "megarl", keeps_ray_address: bool = False) -> Launched:
        started.append(Launched(tmp_path, *arguments, program=program, keeps_ray_address=keeps_ray_address))
        return started[-1]

    yield start
    for command in started:
        command.end()


@pytest.fixture(scope="module")
def pieces(cluster: None, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pieces]:
    """Two data-parallel trainer ranks, one engine, one rollout worker."""
    pieces = build(make_config(world, tmp_path_factory.mktemp("pieces")))
    yield pieces
    pieces.close()


@pytest.fixture
def head(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """A cluster that stays; RAY_ADDRESS names it."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-token-that-every-node-has")
    options = ["--head", "--block", "--port=0", "--num-cpus=4", "--include-dashboard=false", "--disable-usage-stats"]
    head = launch("start", *options, "--object-store-memory=268435456", program="ray")
    head.wait_until(lambda: re.search(r"--address='([^']+)'", head.stdout), 60)
    found = re.search(r"--address='([^']+)'", head.stdout)
    assert found is not None
    monkeypatch.setenv("RAY_ADDRESS", found[1])
    yield head
    assert head.process.poll() is None  # a run's end is not the cluster's
