from __future__ import annotations

from pathlib import Path

from megarl.config import SftConfig
from megarl.config.paths import with_absolute_paths
from megarl.preflight.cluster.cluster_check import required_paths
from tests.run.finished_groups import run_config


def test_all_paths_of_a_run_are_checked(tmp_path: Path) -> None:
    sections = {
        "model": {"path": "/m"},
        "data": {"path": "/d.jsonl", "eval_path": "/e.jsonl"},
        "run_dir": str(tmp_path / "runs" / "one"),
        "export_dir": str(tmp_path / "export"),
        "reward": {"terms": {"judge": {"type": "model", "path": "/judge"}, "match": {"type": "numeric"}}},
    }
    config = run_config({"type": "ppo", "critic": {"path": "/critic"}, "reference": {"path": "/ref"}}, **sections)
    places = required_paths(with_absolute_paths(config))
    assert places.readable == {
        "data.path": "/d.jsonl",
        "data.eval_path": "/e.jsonl",
        "model.path": "/m",
        "algorithm.critic.path": "/critic",
        "algorithm.reference.path": "/ref",
        "reward.terms.judge.path": "/judge",
    }
    assert places.writable == {"run_dir": str(tmp_path), "export_dir": str(tmp_path)}
    # an export into the run folder is not checked separately
    config = SftConfig.model_validate({"run_dir": str(tmp_path), "model": {"path": "/m"}, "data": {"path": "/d"}})
    places = required_paths(with_absolute_paths(config))
    assert places.writable == {"run_dir": str(tmp_path)}
    assert places.readable == {"data.path": "/d", "model.path": "/m"}
