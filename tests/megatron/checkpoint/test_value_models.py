"""Value models on disk: created from language models, exported, kept in checkpoints, and invalid folders."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli.tools.model_conversion import plan_export, plan_import
from megarl.config import ConvertConfig
from megarl.config.trainer import ParallelConfig
from megarl.errors import ConfigError, DataError
from megarl.megatron.command_workers import ConvertWorker
from megarl.megatron.families.load_architecture import find_weight_problems, load_architecture_from_folder
from megarl.megatron.hf_export import save, set_head
from tests.megatron.fidelity.measure import as_trajectory
from tests.megatron.fidelity.models import CONFIGS
from tests.megatron.fidelity.reference import draw
from tests.megatron.rank_models import gather, make_model, model_spec
from tests.megatron.ranks import run_ranks
from tests.megatron.test_hf_export import same_bits

LENGTHS = (5, 9, 2, 14)


def export_on_rank(source, target, sizes, sequences):
    """Export the folder `source` as a value model; return the value of every token, [sequence][token]."""
    rank = make_model(model_spec(source, sizes, head="value"))
    values = rank.values([rank.pack([as_trajectory(tokens)]) for tokens in sequences])
    save(rank, source, target)
    return gather([of[: len(s)] for of, s in zip(values, sequences, strict=False)])[-1]  # from the last stage


def export(tmp_path, source, sequences, **sizes):
    target = tmp_path / "out"
    world = ParallelConfig(**sizes).min_world_size
    return target, run_ranks(export_on_rank, world, tmp_path, source, str(target), sizes, sequences)


def load_with_transformers(folder):
    """Load the folder with transformers; check that no tensor is missing or unexpected."""
    from transformers import AutoModelForSequenceClassification

    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


@torch.no_grad()
def pooled(folder, sequences):
    """Scores of a padded batch, at the last token of each sequence."""
    model = load_with_transformers(folder)
    longest, pad = max(map(len, sequences)), model.config.pad_token_id
    ids = torch.tensor([[*s, *[pad] * (longest - len(s))] for s in sequences])
    mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sequences])
    return model(ids, attention_mask=mask).logits[:, 0]


@pytest.mark.parametrize(("name", "sizes"), [("qwen2", {"tp": 2}), ("qwen3_moe", {"pp": 2})], ids=str)
def test_export_is_a_classifier_with_the_same_values(name, sizes, value_folder, tmp_path):
    source, sequences = value_folder(name), draw(LENGTHS, CONFIGS[name]["vocab_size"])
    target, values = export(tmp_path, source, sequences, **sizes)
    same_bits(target, source)
    written, was = (json.loads((Path(each) / "config.json").read_text()) for each in (target, source))
    assert written == was
    last = torch.stack([of[-1] for of in values])
    torch.testing.assert_close(pooled(target, sequences), last, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "sizes"), [("qwen2", {"tp": 2}), ("deepseek_v3", {"pp": 2})], ids=str)
def test_language_model_becomes_a_value_model_with_zero_head(name, sizes, model_folder, tmp_path):
    source, sequences = model_folder(name), draw(LENGTHS, CONFIGS[name]["vocab_size"])
    target, values = export(tmp_path, source, sequences, **sizes)
    assert all(torch.equal(of, torch.zeros(len(s))) for of, s in zip(values, sequences, strict=True))
    got, was = load_file(target / "model.safetensors"), load_file(f"{source}/model.safetensors")
    score = got.pop("score.weight")
    assert torch.equal(score, torch.zeros(1, CONFIGS[name]["hidden_size"]))
    assert was.keys() - got.keys() == {n for n in was if n == "lm_head.weight" or n.startswith("model.layers.4.")}
    assert all(torch.equal(tensor, was[n]) for n, tensor in got.items())
    assert torch.equal(pooled(target, sequences), torch.zeros(len(sequences)))
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    assert (config["id2label"], config.get("num_nextn_predict_layers", 0)) == ({"0": "LABEL_0"}, 0)
    assert find_weight_problems(target, load_architecture_from_folder(target, head="value")) == []


@pytest.mark.parametrize(("ends", "pads"), [([1, 7], 1), (9, 9)])
def test_pad_token_defaults_to_the_eos_token(ends, pads, value_folder):
    config = {"pad_token_id": None, "eos_token_id": ends}
    set_head(config, load_architecture_from_folder(Path(value_folder("qwen2")), head="value"))
    assert config["pad_token_id"] == pads


def convert_on_rank(spec, read, source, write, target):
    worker = ConvertWorker(spec)
    read(worker, source)
    write(worker, target)


def load_error_on_rank(spec, root):
    with pytest.raises(DataError) as error:
        ConvertWorker(spec).read_checkpoint(f"{root}/release")
    return str(error.value)


def convert(tmp_path, plan, source, output, **sizes):
    """Run a planned conversion on this test's ranks."""
    conversion = plan(ConvertConfig(), Path(source), output, "auto")
    assert conversion.head == "value"
    output.mkdir()
    spec = model_spec(str(conversion.description), sizes, dtype=conversion.dtype, head=conversion.head)
    steps = conversion.read, str(conversion.weights), conversion.write, str(output)
    run_ranks(convert_on_rank, ParallelConfig(**sizes).min_world_size, tmp_path, spec, *steps)


@pytest.mark.parametrize(
    ("name", "there", "back"),
    [
        ("qwen2", {"tp": 2}, {"pp": 2}),
        pytest.param("gemma2", {"pp": 2, "vpp": 2}, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"tp": 2, "ep": 2, "etp": 1, "pp": 2}, {"tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_round_trip_through_a_checkpoint_is_bitwise_exact(name, there, back, value_folder, tmp_path):
    source = value_folder(name)
    convert(tmp_path, plan_import, source, tmp_path / "checkpoint", **there)
    convert(tmp_path, plan_export, tmp_path / "checkpoint", tmp_path / "back", **back)
    same_bits(tmp_path / "back", source)
    load_with_transformers(tmp_path / "back")


def test_checkpoint_of_a_language_model_is_rejected_for_a_value_model(value_folder, model_folder, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    read, write = ConvertWorker.read_hf, ConvertWorker.write_checkpoint
    checkpoint.mkdir()
    folder = model_folder("qwen2 linear")
    run_ranks(convert_on_rank, 1, tmp_path, model_spec(folder), read, folder, write, str(checkpoint))
    value_spec = model_spec(value_folder("qwen2 linear"), head="value")
    error = run_ranks(load_error_on_rank, 1, tmp_path, value_spec, str(checkpoint))
    assert "output_layer.weight needs shape [1, 48], got [512, 48]" in error


def altered(folder, tmp_path, change):
    """Copy the folder with changed tensors."""
    shutil.copytree(folder, tmp_path / "altered")
    tensors = load_file(f"{folder}/model.safetensors")
    save_file(change(tensors), tmp_path / "altered" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "altered"


@pytest.mark.parametrize("name", ["qwen2", "qwen2 linear", "deepseek_v3"])
def test_valid_folders_have_no_problems(name, model_folder, value_folder):
    for folder in (Path(model_folder(name)), Path(value_folder(name))):
        assert find_weight_problems(folder, load_architecture_from_folder(folder, head="value")) == []
        assert find_weight_problems(folder, load_architecture_from_folder(folder, head=None)) == []


def without_score(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != "score.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_score, "lacks 1 of the .* tensors of Qwen2ForSequenceClassification, first score.weight$"),
        (lambda t: t | {"score.weight": torch.ones(2, 48)}, r"score.weight: needs \(1, 48\), got \(2, 48\)"),
        (lambda t: t | {"lm_head.weight": torch.ones(331, 48)}, "does not have, first lm_head.weight"),
    ],
    ids=["no score tensor", "two labels", "a language head"],
)
def test_other_tensors_are_reported(change, message, value_folder, tmp_path):
    folder = altered(value_folder("qwen2"), tmp_path, change)
    (problem,) = find_weight_problems(folder, load_architecture_from_folder(folder, head="value"))
    assert re.search(message, problem), problem


def read_error_on_rank(source, head):
    with pytest.raises((ConfigError, DataError)) as error:
        make_model(model_spec(source, head=head))
    return str(error.value)


def test_ranks_reject_folders_with_the_wrong_head(value_folder, tmp_path):
    without = altered(value_folder("qwen2"), tmp_path, without_score)
    assert "has a value head and no logits" in run_ranks(read_error_on_rank, 1, tmp_path, value_folder("qwen2"), "lm")
    assert run_ranks(read_error_on_rank, 1, tmp_path, str(without), "value").endswith("tensors is named score.weight")
