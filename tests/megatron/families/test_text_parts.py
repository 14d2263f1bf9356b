"""Language models of folders that hold a vision tower too: scores, and exports that repeat the tower's tensors.

Kimi-K2.5's experts are in INT4; tensors that are repeated may be quantized too.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import find_weight_problems, load_architecture_from_folder
from tests.errors import expect_error
from tests.megatron.checkpoint.test_model_state import convert_on_rank
from tests.megatron.fidelity.measure import TOLERANCE, score_on_ranks
from tests.megatron.fidelity.models import CONFIGS, VISION, build, save_vision_model
from tests.megatron.fidelity.reference import SHORT, draw, score
from tests.megatron.ranks import run_ranks
from tests.megatron.test_hf_export import errors_of, export, load_folder, same_bits
from tests.model_files.quantized import INT4, QUANTIZATION, dequantize, pack_int4, quantize


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
    stored = load_folder(folder)
    stored |= {name: t.bfloat16() for name, t in stored.items() if name.startswith("vision_tower.")}
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text((Path(folder) / "config.json").read_text())
    assert errors_of(export(tmp_path, str(source), options={"file_bytes": 40_000})) == [None]
    same_bits(tmp_path / "out", source)


def test_value_models_do_not_start_from_such_a_folder(folders):
    with expect_error(ConfigError, "config.json", "value model", "Gemma3ForConditionalGeneration"):
        load_architecture_from_folder(Path(folders("gemma3")[0]), head="value")


def test_exported_dtype_is_stated_for_the_language_model(folders, tmp_path):
    folder = folders("gemma3")[0]
    assert errors_of(export(tmp_path, folder, dtype="bfloat16")) == [None]
    before, after = (json.loads((Path(path) / "config.json").read_text()) for path in (folder, tmp_path / "out"))
    assert before["text_config"]["dtype"] == "float32"
    assert (after["dtype"], after["text_config"]["dtype"]) == ("bfloat16", "bfloat16")


def test_repeated_tensors_in_fp8_become_bfloat16(folders, tmp_path):
    folder, source = folders("qwen3_5")[0], tmp_path / "fp8"
    source.mkdir()
    stored, (values, scales) = load_folder(folder), quantize(torch.randn(130, 200))
    mtp = {"mtp.fc.weight": values, "mtp.fc.weight_scale_inv": scales, "mtp.norm.weight": torch.randn(48)}
    save_file(stored | mtp, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((Path(folder) / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    assert errors_of(export(tmp_path, str(source), tp=2)) == [None, None]
    got = load_folder(tmp_path / "out")
    assert got.keys() == stored.keys() | {"mtp.fc.weight", "mtp.norm.weight"}
    assert torch.equal(got["mtp.fc.weight"], dequantize(values, scales, torch.bfloat16))
    assert torch.equal(got["mtp.norm.weight"], mtp["mtp.norm.weight"])


KIMI = CONFIGS["deepseek_v3"] | {"hidden_size": 64, "moe_intermediate_size": 96, "num_nextn_predict_layers": 0}
KIMI |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """Return a folder like that of Kimi-K2.5, and one of its language model alone with the experts decoded.

    Weights have other names in the first, experts are in INT4, and there are tensors of a vision tower.
    """
    root = tmp_path_factory.mktemp("kimi")
    build(KIMI).save_pretrained(root / "text")
    stored: dict[str, torch.Tensor] = {}
    decoded = load_folder(root / "text")
    for name, tensor in decoded.items():
        if ".mlp.experts." not in name:
            stored[f"language_model.{name}"] = tensor
            continue
        parts = pack_int4(tensor.bfloat16())
        stored |= {f"language_model.{name}_{part}": value for part, value in parts.items()}
        codes = (parts["packed"].unsqueeze(-1) >> (4 * torch.arange(8))) % 16 - 8
        groups = codes.view(*parts["scale"].shape, 32).bfloat16() * parts["scale"].unsqueeze(-1)
        decoded[name] = groups.view(tensor.shape).float()
    save_file(decoded, root / "text/model.safetensors", metadata={"format": "pt"})
    stored |= {"vision_tower.blocks.0.wqkv.weight": torch.randn(30, 10), "mm_projector.proj.0.bias": torch.randn(64)}
    (root / "int4").mkdir()
    save_file(stored, root / "int4/model.safetensors", metadata={"format": "pt"})
    config = json.loads((root / "text/config.json").read_text())
    text = config | {"model_type": "kimi_k2", "quantization_config": INT4, "num_nextn_predict_layers": 1}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "float32"}
    tree = outer | {"text_config": text, "tie_word_embeddings": False, "vision_config": {"vt_hidden_size": 10}}
    (root / "int4/config.json").write_text(json.dumps(tree))
    return str(root / "int4"), str(root / "text")


def decoded_tensors(folder, text):
    """Return the tensors of `folder` with the language model of the folder `text`, which is not quantized."""
    others = {name: t for name, t in load_folder(folder).items() if not name.startswith("language_model.")}
    return others | {f"language_model.{name}": tensor for name, tensor in load_folder(text).items()}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_kimi_in_int4_scores_as_transformers_on_the_decoded_weights(kimi, tmp_path):
    folder, text = kimi
    sequences = draw(SHORT, KIMI["vocab_size"])
    assert find_weight_problems(Path(folder), load_architecture_from_folder(Path(folder))) == []
    got = score_on_ranks(folder, sequences, tmp_path, world=2, tp=2, ep=2, etp=1)
    for i, logprobs in enumerate(score(text, sequences)):
        torch.testing.assert_close(got[i][0], logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gemma3", "Kimi-K2.5"])
def test_tower_survives_conversion_to_megatron_and_back(name, folders, kimi, tmp_path):
    folder = folders(name)[0] if name in VISION else kimi[0]
    (tmp_path / "checkpoint").mkdir()
    run_ranks(convert_on_rank, 1, tmp_path, folder, str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    assert_equal(load_folder(tmp_path / "out"), load_folder(folder) if name in VISION else decoded_tensors(*kimi))


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2, "ep": 2}])
def test_kimi_is_exported_without_quantization(kimi, tmp_path, sizes):
    folder, text = kimi
    assert set(errors_of(export(tmp_path, folder, **sizes))) == {None}
    assert_equal(load_folder(tmp_path / "out"), decoded_tensors(folder, text))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    assert config["text_config"]["num_nextn_predict_layers"] == 0, "the folder has no tensors of the layer"
    assert load_architecture_from_folder(tmp_path / "out") == load_architecture_from_folder(Path(folder))
