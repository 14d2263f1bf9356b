"""Language models of folders that hold a vision tower too: scores, and exports that repeat the tower's tensors."""

import json
from pathlib import Path

import pytest
import torch

from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import find_weight_problems, load_architecture_from_folder
from tests.errors import expect_error
from tests.megatron.fidelity.measure import TOLERANCE, score_on_ranks
from tests.megatron.fidelity.models import CONFIGS, VISION, save_vision_model
from tests.megatron.fidelity.reference import SHORT, draw, score
from tests.megatron.hf_weights.test_export import errors_of, export, load_folder, same_bits


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Function from a model name to the folders of the model with a vision tower and of its language model."""
    root = tmp_path_factory.getbasetemp() / "models"
    return lambda name: save_vision_model(name, root)


@pytest.mark.parametrize("name", VISION)
def test_logprobs_match_the_language_model_alone(name, folders, tmp_path):
    folder, text = folders(name)
    sequences = draw(SHORT, CONFIGS[name]["vocab_size"])
    assert find_weight_problems(Path(folder), load_architecture_from_folder(Path(folder))) == []
    got = score_on_ranks(folder, sequences, tmp_path)
    for i, logprobs in enumerate(score(text, sequences)):
        torch.testing.assert_close(got[i][0], logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", VISION)
def test_exports_repeat_the_tower_bit_by_bit(name, folders, tmp_path):
    folder, text = folders(name)
    assert errors_of(export(tmp_path, folder, tp=2)) == [None, None]
    same_bits(tmp_path / "out", folder)
    assert len(load_folder(tmp_path / "out")) > len(load_folder(text))
    assert json.loads((tmp_path / "out/config.json").read_text())["vision_config"]


def test_tower_that_is_stored_in_another_dtype_keeps_it(folders, tmp_path):
    folder, _ = folders("gemma3")
    source = tmp_path / "half"
    source.mkdir()
    from safetensors.torch import save_file

    stored = load_folder(folder)
    stored |= {name: t.bfloat16() for name, t in stored.items() if name.startswith("vision_tower.")}
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text((Path(folder) / "config.json").read_text())
    assert errors_of(export(tmp_path, str(source), options={"file_bytes": 40_000})) == [None]
    same_bits(tmp_path / "out", source)


def test_value_models_do_not_start_from_such_a_folder(folders):
    with expect_error(ConfigError, "config.json", "value model", "Gemma3ForConditionalGeneration"):
        load_architecture_from_folder(Path(folders("gemma3")[0]), head="value")
