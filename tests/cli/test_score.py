"""`megarl score`: checks of configuration and input before anything starts, and progress output."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.score import ScoreProgressBar
from megarl.config import make_score_config
from megarl.data.token_file import TokenCount
from megarl.errors import ConfigError
from megarl.offline.token_scoring import ScoreProgress
from tests.cli.tiny_run import write_rows
from tests.megatron.fidelity.models import CONFIGS, build


@pytest.fixture
def refused(tiny_model: Path, refusal, no_cluster) -> Callable[..., str]:
    """Function that runs the command on rows, which has to be refused; returns the error output."""

    def score(
        *rows: Any, folder: Path = tiny_model, output: str = "scores.jsonl", options: tuple[str, ...] = ()
    ) -> str:
        write_rows(Path("tokens.jsonl"), list(rows))
        return refusal("score", "--model", folder, "--input", "tokens.jsonl", "--output", output, *options)

    return score


def test_default_slots_are_the_smallest_world_size():
    assert make_score_config("m").sized_placement.slots == 1
    wide = make_score_config("m", ["trainer.parallel.tp=2", "trainer.parallel.pp=2", "placement.device=cpu"])
    assert (wide.sized_placement.slots, wide.sized_placement.device) == (4, "cpu")
    experts = make_score_config("m", [f"trainer.parallel.{size}" for size in ("tp=2", "ep=3", "etp=1", "pp=2")])
    assert experts.sized_placement.slots == 12


def test_more_slots_make_more_replicas():
    config = make_score_config("m", ["trainer.parallel.tp=2", "placement.slots_per_node=8", "placement.nodes=2"])
    assert config.sized_placement == config.placement
    assert make_score_config("m", ["placement.nodes=3"]).sized_placement.slots == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.paralel.tp=2", "trainer.paralel: unknown key"),
        ("rollout.tp=2", "rollout: unknown key"),
        ("temperature=0", "temperature: Input should be greater than 0, got 0"),
    ],
)
def test_unknown_keys_and_invalid_values_are_rejected(override, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make_score_config("m", [override])


def test_invalid_lines_are_reported_before_anything_starts(refused, tmp_path):
    (tmp_path / "scores.jsonl").write_text("from an earlier run")
    assert refused({"token_ids": [1, 2]}, {"token_ids": [1, 384]}, {"id": 3}) == (
        "error: tokens.jsonl:2: token_ids[1] needs to be below the model's vocab_size = 384, got 384\n"
        "tokens.jsonl:3: needs a list of integers under token_ids, the line has 'id'\n"
    )
    assert (tmp_path / "scores.jsonl").read_text() == "from an earlier run"
    assert {path.name for path in tmp_path.iterdir()} == {"scores.jsonl", "tokens.jsonl"}


def test_inputs_that_cannot_be_scored_are_refused(refused, tmp_path):
    err = refused({"token_ids": [1] * 129})
    assert "token_ids has 129 tokens, 1 more than the model's max_position_embeddings = 128" in err
    err = refused({"token_ids": [1]}, folder=Path("none"))
    assert err.startswith("error: model.path: needs a folder in Hugging Face format")
    assert "tokens.jsonl is the input" in refused({"token_ids": [1]}, output="./tokens.jsonl")
    assert json.loads((tmp_path / "tokens.jsonl").read_text()) == {"token_ids": [1]}


def test_missing_weights_and_impossible_sizes_are_reported_together(refused, tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "model.safetensors").unlink()
    sizes = ("trainer.parallel.tp=3", "trainer.parallel.pp=3", "placement.slots_per_node=5")
    err = refused({"token_ids": [1]}, folder=folder, options=("--set", *sizes))
    assert f"model.path: {folder} " in err
    assert "trainer.parallel.tp: model.layers.0.self_attn.q_proj.weight has " in err
    assert "trainer.parallel.pp: pp needs to divide the layers, got 2 % 3 = 2" in err
    assert "placement: tp * pp * cp needs to divide the slots, got 5 % (3 * 3 * 1) = 5" in err


def test_progress_off_a_terminal_is_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr("megarl.cli.score.PROGRESS_INTERVAL_SECONDS", 0.0)
    with ScoreProgressBar(TokenCount(num_lines=3000, num_tokens=30_000)) as progress:
        progress.show(ScoreProgress(num_lines=1000, num_tokens=10_000, seconds=2.0))
        progress.show(ScoreProgress(num_lines=3000, num_tokens=30_000, seconds=5.0))
    lines = "scored 1,000/3,000 lines  5.00 ktok/s\nscored 3,000/3,000 lines  6.00 ktok/s  5.0 s\n"
    assert capsys.readouterr() == ("", lines)


def test_missing_mtp_layers_are_reported(refused, tmp_path):
    folder = tmp_path / "without-mtp"
    build(CONFIGS["deepseek_v3"]).save_pretrained(folder)
    notice = f"model.path: {folder}: config.json names 1 MTP layer, the folder has none: ignoring it\n"
    assert notice in refused({"token_ids": []}, folder=folder)
