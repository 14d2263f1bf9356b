"""`megarl demo`: the data, the stages with their configurations, and the summary; the stages themselves do not run."""

import json
from typing import Any

from megarl.cli import main
from megarl.config import RunConfig, SftConfig
from megarl.controller import run_stage as driver


def test_data_only_writes_the_problems_and_rotates_an_earlier_folder(tmp_path):
    out = tmp_path / "demo"
    for _ in range(2):
        assert main.main(["demo", "--data-only", "--out", str(out)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"demo", "demo.1"}
    names = {path.name for path in (out / "data").iterdir()}
    assert {"train.jsonl", "heldout.jsonl", "sft.jsonl"} <= names
    assert (out / "data/train.jsonl").read_bytes() == (tmp_path / "demo.1/data/train.jsonl").read_bytes()


def test_fine_tuning_is_followed_by_grpo_on_its_model(tmp_path, monkeypatch, capsys):
    out, stages = tmp_path / "demo", []

    def run_stage(config: SftConfig | RunConfig, *_: Any, **__: Any) -> None:
        stages.append(config)
        summary = {"eval_before": 0.25, "eval_after": 0.75, "seconds_by_phase": {"start": 1.0}, "seconds_total": 2.0}
        (out / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(driver, "run_stage", run_stage)
    assert main.main(["demo", "--out", str(out), "--seed", "3", "--set", "trainer.steps=5"]) == 0
    sft, grpo = stages
    assert isinstance(sft, SftConfig)
    assert isinstance(grpo, RunConfig)
    assert (sft.seed, grpo.seed, grpo.trainer.steps) == (3, 3, 5)
    assert grpo.model.path == str(sft.export_path)
    assert sft.data.path == f"{out}/data/sft.jsonl"
    assert (grpo.data.path, grpo.data.eval_path) == (f"{out}/data/train.jsonl", f"{out}/data/heldout.jsonl")
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["seconds_by_phase"]) == ["make_data", "sft", "start"]
    assert "held-out accuracy 0.250 -> 0.750" in capsys.readouterr().out
