"""`megarl eval`: prints one JSON object and leaves the run folder as it is."""

from __future__ import annotations

import json
from pathlib import Path

from tests.end_to_end.conftest import Launch
from tests.end_to_end.tiny_world import NUM_HELD_OUT, write_run

SCORES = [i / NUM_HELD_OUT for i in range(NUM_HELD_OUT + 1)]


def test_eval_prints_one_json_object(world: Path, tmp_path: Path, launch: Launch) -> None:
    earlier = tmp_path / "run" / "metrics.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("{}\n")
    command = launch("eval", write_run(world, tmp_path, placement={"slots_per_node": 1}), "--json")
    assert command.wait() == 0, command.stderr
    result = json.loads(command.stdout.splitlines()[-1])
    assert result["eval/one"] in SCORES
    assert result["model"] == str(world / "model")
    command.assert_no_processes_left()
    assert command.find_leftovers() == []
    assert earlier.read_text() == "{}\n", "the files of an earlier run must not be moved"
