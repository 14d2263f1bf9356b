"""Conversion of a model to a Megatron checkpoint and back, compared in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.conftest import Launch, RunCommand
from tests.megatron.families.outside import STORY_PATH, write_story
from tests.megatron.fidelity.models import save_model

COMPANIONS = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}", "merges.txt": "a b\n"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(save_model("qwen3_moe", tmp_path_factory.mktemp("models")))
    for name, text in COMPANIONS.items():
        (folder / name).write_text(text)
    return folder


def test_conversion_round_trip_is_bitwise_equal(
    model: Path, tmp_path: Path, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "parent" / "back"
    sizes = ("trainer.parallel.tp=2", "trainer.parallel.ep=2", "trainer.parallel.etp=1")
    assert run_here("convert", "hf-to-megatron", "--model", model, "--output", checkpoint, "--set", *sizes) == 0
    out, err = capsys.readouterr()
    assert out.split() == ["checkpoint", str(checkpoint)]
    assert err.splitlines()[:3] == ["starting 2 ranks", "reading", "writing"]
    assert {path.name for path in checkpoint.iterdir()} == {"latest_checkpointed_iteration.txt", "release", "hf"}
    assert (checkpoint / "latest_checkpointed_iteration.txt").read_text() == "release"
    release = {path.name for path in (checkpoint / "release").iterdir()}
    assert release == {".metadata", "metadata.json", "common.pt", "__0_0.distcp", "__1_0.distcp"}
    companions = {path.name for path in model.iterdir()} - {"model.safetensors"}
    assert {path.name for path in (checkpoint / "hf").iterdir()} == companions

    other = ("--set", "trainer.parallel.pp=2")
    assert run_here("convert", "megatron-to-hf", "--model", checkpoint, "--output", back, *other) == 0
    out, err = capsys.readouterr()
    assert out.split() == ["model", str(back)]
    assert err.splitlines()[-1].startswith("converted ")
    assert {path.name for path in back.iterdir()} == companions | {"model.safetensors"}
    assert {path.name for path in back.parent.iterdir()} == {"back"}
    assert {name: (back / name).read_text() for name in COMPANIONS} == COMPANIONS
    same_logits(back, model)


@pytest.mark.slow
def test_family_outside_the_package(tmp_path: Path, launch: Launch) -> None:
    model = write_story(Path(save_model("llama3", tmp_path / "models")), tmp_path / "story")
    checkpoint, back, family = tmp_path / "checkpoint", tmp_path / "back", ("--family", STORY_PATH)
    there = launch("convert", "hf-to-megatron", "--model", model, "--output", checkpoint, *family)
    assert there.wait() == 0, there.stderr
    there.assert_no_processes_left()
    assert there.find_leftovers() == []
    again = launch("convert", "megatron-to-hf", "--model", checkpoint, "--output", back, *family)
    assert again.wait() == 0, again.stderr
    same_weights(back, model)


def same_weights(back: Path, model: Path) -> None:
    want, got = load_file(model / "model.safetensors"), load_file(back / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def same_logits(back: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    same_weights(back, model)
    loaded, report = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    assert not any(report.values())
    ids = torch.arange(2, 60)[None]
    assert torch.equal(loaded(ids).logits, AutoModelForCausalLM.from_pretrained(model)(ids).logits)
