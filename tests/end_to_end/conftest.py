"""One tiny world for the session, and commands that are ended with their test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.launched import Launched
from tests.end_to_end.pieces import Pieces, build, make_config
from tests.end_to_end.tiny_world import write_world

Launch = Callable[..., Launched]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` and `data/`."""
    return write_world(tmp_path_factory.mktemp("world"))


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
