"""`megarl eval`: prints one JSON object and leaves the run folder as it is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.groups import build
from tests.end_to_end.components import Components
from tests.end_to_end.conftest import Launch, RunCommand
from tests.end_to_end.tiny_world import NUM_HELD_OUT, write_run

SCORES = [i / NUM_HELD_OUT for i in range(NUM_HELD_OUT + 1)]


def check_result(line: str, world: Path) -> None:
    result = json.loads(line)
    assert result["eval/one"] in SCORES
    assert result["model"] == str(world / "model")


def test_eval_prints_one_json_object(
    components: Components,
    run_here: RunCommand,
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the engine that other tests use too."""
    engines: Any = SimpleNamespace(**vars(components.engines))
    for name in ("remote_engines", "name", "first_completion_time", "wait_started"):
        setattr(engines, name, getattr(components.engines, name))
    has_ended: list[bool] = []
    engines.shutdown = lambda: has_ended.append(True)
    monkeypatch.setattr(build, "EngineGroup", lambda *_: engines)
    earlier = tmp_path / "run" / "metrics.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("{}\n")
    components.weights.push(0)
    assert run_here("eval", write_run(world, tmp_path), "--json") == 0
    check_result(capsys.readouterr().out.splitlines()[-1], world)
    assert has_ended
    assert earlier.read_text() == "{}\n", "the files of an earlier run must not be moved"


@pytest.mark.slow
def test_eval_leaves_no_processes_or_files(world: Path, tmp_path: Path, launch: Launch) -> None:
    command = launch("eval", write_run(world, tmp_path, placement={"slots_per_node": 1}), "--json")
    assert command.wait() == 0, command.stderr
    check_result(command.stdout.splitlines()[-1], world)
    command.assert_no_processes_left()
    assert command.find_leftovers() == []
