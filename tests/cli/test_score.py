"""`megarl score`: checks of configuration and input before anything starts, and progress output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import main
from megarl.cli.score import ScoreProgressBar
from megarl.config import make_score_config
from megarl.data.token_file import TokenCount
from megarl.errors import ConfigError
from megarl.offline.token_scoring import ScoreProgress
from tests.cli.tiny_run import write_rows, write_tiny_run
from tests.megatron.fidelity.models import CONFIGS, build

Score = Callable[..., int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folder: 4 heads, 2 key-value heads, 2 layers, 384 token ids, 128 positions."""
    folder = tmp_path_factory.mktemp("score")
    write_tiny_run(folder)
    return folder / "model"


@pytest.fixture
def score(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Score:
    """Function that runs the command in `tmp_path`; starting a cluster fails the test."""

    def start(*_: Any) -> None:
        raise AssertionError("the cluster was started")

    def run(*rows: Any, folder: Path = model, output: str = "scores.jsonl", overrides: tuple[str, ...] = ()) -> int:
        write_rows(tmp_path / "tokens.jsonl", list(rows))
        command = ["score", "--model", str(folder), "--input", "tokens.jsonl", "--output", output]
        return main([*command, *(["--set", *overrides] if overrides else [])])

    monkeypatch.setattr("megarl.controller.ray_session.start_cluster", start)
    monkeypatch.chdir(tmp_path)
    return run


def test_default_slots_are_the_smallest_world_size() -> None:
    assert make_score_config("m").sized_placement.slots == 1
    wide = make_score_config("m", ["trainer.parallel.tp=2", "trainer.parallel.pp=2", "placement.device=cpu"])
    assert (wide.sized_placement.slots, wide.sized_placement.device) == (4, "cpu")
    experts = make_score_config("m", [f"trainer.parallel.{size}" for size in ("tp=2", "ep=3", "etp=1", "pp=2")])
    assert experts.sized_placement.slots == 12


def test_more_slots_make_more_replicas() -> None:
    config = make_score_config("m", ["trainer.parallel.tp=2", "placement.slots_per_node=8", "placement.nodes=2"])
    assert config.sized_placement == config.placement
    assert make_score_config("m", ["placement.nodes=3"]).sized_placement.slots == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.paralel.tp=2"], "trainer.paralel: unknown key"),
        (["rollout.tp=2"], "rollout: unknown key"),
        (["temperature=0"], "temperature: Input should be greater than 0, got 0"),
    ],
)
def test_unknown_keys_and_invalid_values_are_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_score_config("m", overrides)
    assert str(error.value) == message


def test_invalid_lines_are_reported_before_anything_starts(
    score: Score, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scores.jsonl").write_text("from an earlier run")
    assert score({"token_ids": [1, 2]}, {"token_ids": [1, 384]}, {"id": 3}) == 2
    assert capsys.readouterr() == (
        "",
        "error: tokens.jsonl:2: token_ids[1] needs to be below the model's vocab_size = 384, got 384\n"
        "tokens.jsonl:3: needs a list of integers under token_ids, the line has 'id'\n",
    )
    assert (tmp_path / "scores.jsonl").read_text() == "from an earlier run"
    assert {path.name for path in tmp_path.iterdir()} == {"scores.jsonl", "tokens.jsonl"}


def test_a_sequence_longer_than_the_context(score: Score, capsys: pytest.CaptureFixture[str]) -> None:
    assert score({"token_ids": [1] * 129}) == 2
    assert "token_ids has 129 tokens, 1 more than the model's max_position_embeddings = 128" in capsys.readouterr().err


def test_the_input_is_not_overwritten(score: Score, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score({"token_ids": [1]}, output="./tokens.jsonl") == 2
    assert "tokens.jsonl is the input" in capsys.readouterr().err
    assert json.loads((tmp_path / "tokens.jsonl").read_text()) == {"token_ids": [1]}


def test_missing_model_folder(score: Score, capsys: pytest.CaptureFixture[str]) -> None:
    assert score({"token_ids": [1]}, folder=Path("none")) == 2
    assert capsys.readouterr().err.startswith("error: model.path: needs a folder in Hugging Face format")


def test_missing_weights_and_impossible_sizes_are_reported_together(
    score: Score, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    sizes = ("trainer.parallel.tp=3", "trainer.parallel.pp=3", "placement.slots_per_node=5")
    assert score({"token_ids": [1]}, folder=folder, overrides=sizes) == 2
    err = capsys.readouterr().err
    assert f"model.path: {folder} " in err
    assert "trainer.parallel.tp: model.layers.0.self_attn.q_proj.weight has " in err
    assert "trainer.parallel.pp: pp needs to divide the layers, got 2 % 3 = 2" in err
    assert "placement: tp * pp * cp needs to divide the slots, got 5 % (3 * 3 * 1) = 5" in err


def test_progress_off_a_terminal_is_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megarl.cli.score.PROGRESS_INTERVAL_SECONDS", 0.0)
    with ScoreProgressBar(TokenCount(num_lines=3000, num_tokens=30_000)) as progress:
        progress.show(ScoreProgress(num_lines=1000, num_tokens=10_000, seconds=2.0))
        progress.show(ScoreProgress(num_lines=3000, num_tokens=30_000, seconds=5.0))
    assert capsys.readouterr() == (
        "",
        "scored 1,000/3,000 lines  5.00 ktok/s\nscored 3,000/3,000 lines  6.00 ktok/s  5.0 s\n",
    )


def test_missing_mtp_layers_are_reported(score: Score, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "without-mtp"
    build(CONFIGS["deepseek_v3"]).save_pretrained(folder)
    assert score({"token_ids": []}, folder=folder) == 2
    notice = f"model.path: {folder}: config.json names 1 MTP layer, the folder has none: ignoring it\n"
    assert notice in capsys.readouterr().err
