"""config.json read together with the stored tensors, compared with transformers; stop tokens; Git LFS pointers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.errors import DataError
from megarl.megatron.families.load_architecture import (
    FAMILY_READERS,
    find_folder_notices,
    find_weight_problems,
    read_hf_config,
)
from megarl.megatron.families.load_architecture import load_architecture_from_folder as load
from megarl.model_files import model_config
from megarl.model_files.header import read_header
from megarl.model_files.json_object import read_json_object
from megarl.model_files.model_config import (
    ARCHITECTURES,
    copy_companions,
    describe_unread_file,
    find_corrections,
    has_own_head,
    holds_same_values,
    read_model_config,
    read_stop_token_ids,
)
from tests.errors import expect_error
from tests.megatron.conftest import save_model
from tests.megatron.fidelity.models import CONFIGS, append_prediction_layer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22ead\nsize 1\n"


def edit_json(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(file: Path, **changes: torch.Tensor) -> None:
    save_file(load_file(file) | {name.replace("__", "."): t for name, t in changes.items()}, file, {"format": "pt"})


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """Folder of a tied model without a stored head."""
    return Path(save_model(tmp_path / "tied", "qwen2", tie_word_embeddings=True))


def embedding(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def last_value_differs(weight: torch.Tensor) -> torch.Tensor:
    other = weight.clone()
    other[-1, -1] += 0.5
    return other


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, ["some text"], seed=0)
    return folder


@pytest.fixture
def tiny(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a copy of a tiny model with a tokenizer."""
    return Path(shutil.copytree(tiny_model, tmp_path / "tiny"))


CHANGES = {
    "no head": None,
    "a copy": torch.clone,
    "a copy but for the sign of a zero": lambda weight: torch.where(weight == 0, -weight, weight),
    "the last value differs": last_value_differs,
    "random values": lambda weight: torch.randn_like(weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_stored_head_with_other_values_is_used_as_in_transformers(
    tied: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_config, "CHUNK_BYTES", 1000)  # so that there are many chunks
    weight = embedding(tied)
    weight[3, 5] = 0.0
    edit_tensors(tied / "model.safetensors", model__embed_tokens__weight=weight)
    make = CHANGES[change]
    if make is not None:
        edit_tensors(tied / "model.safetensors", lm_head__weight=make(weight))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tied)
    is_tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert has_own_head(tied) == (not is_tied) == (change in ("the last value differs", "random values"))
    assert read_model_config(tied)["tie_word_embeddings"] == is_tied
    assert load(tied).tie_embeddings == is_tied
    assert find_weight_problems(tied, load(tied)) == []
    notices = find_folder_notices(tied)
    assert [str(tied) in notice and "using that head" in notice for notice in notices] == [True] * (not is_tied)
    assert find_folder_notices(tied, head="value") == []


def test_only_what_differs_from_config_json_is_corrected(tied: Path) -> None:
    assert find_corrections(tied) == {}
    edit_tensors(tied / "model.safetensors", lm_head__weight=embedding(tied) + 1)
    assert find_corrections(tied) == {"tie_word_embeddings": False}
    edit_json(tied / "config.json", tie_word_embeddings=False)
    assert find_corrections(tied) == {}
    assert find_corrections(tied / "nowhere") == {}


@pytest.mark.parametrize(("dtype", "other"), [("float32", "bfloat16"), ("float16", "float64"), ("bfloat16", "float16")])
def test_values_are_compared_whatever_the_dtype(tmp_path: Path, dtype: str, other: str) -> None:
    values = torch.tensor([[1.5, -2.0], [0.25, 3.0]])
    tensors = {"a": values.to(getattr(torch, dtype)), "b": values.to(getattr(torch, other)), "c": values.T.contiguous()}
    save_file(tensors, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")
    assert holds_same_values(stored["a"], stored["b"])
    assert not holds_same_values(stored["a"], stored["c"])
    save_file(tensors | {"b": tensors["b"] * 2}, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")
    assert not holds_same_values(stored["a"], stored["b"])


def test_copies_in_prediction_layers_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    folder = Path(save_model(tmp_path / "model", "deepseek_v3"))
    file = folder / "model.safetensors"
    append_prediction_layer(file, CONFIGS["deepseek_v3"] | {"num_hidden_layers": 2})
    assert find_weight_problems(folder, load(folder)) == []
    head, words = "model.layers.2.shared_head.head.weight", "model.layers.2.embed_tokens.weight"
    for name, original in ((head, "lm_head.weight"), (words, "model.embed_tokens.weight")):
        edit_tensors(file, **{name: load_file(file)[name] + 1})
        (problem,) = find_weight_problems(folder, load(folder))
        assert problem.startswith(f"{file}: {name} differs from {original}, of which it needs to be a copy")
        edit_tensors(file, **{name: load_file(file)[original].clone()})
    edit_tensors(file, **{head: load_file(file)[head] + 1})
    assert find_weight_problems(folder, load(folder, head="value")) == [], "a value model reads neither"


def test_a_single_file_beside_an_index_that_does_not_list_it_is_reported(tied: Path) -> None:
    shutil.copytree(tied, tied / "other")
    model = transformers.AutoModelForCausalLM.from_pretrained(tied)
    model.save_pretrained(tied, max_shard_size="50KB")
    assert (tied / "model.safetensors.index.json").exists()
    (tied / "model.safetensors").unlink(missing_ok=True)
    assert describe_unread_file(tied) is None
    shutil.copy(tied / "other/model.safetensors", tied)
    expected = f"{tied}/model.safetensors is not read: model.safetensors.index.json lists other files"
    assert [notice[: len(expected)] for notice in find_folder_notices(tied)] == [expected]


def test_architectures_follow_from_the_model_type_as_in_transformers(tied: Path) -> None:
    assert set(ARCHITECTURES.values()) == set(FAMILY_READERS) - {"MiMoForCausalLM"}  # transformers does not have it
    assert {kind: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in ARCHITECTURES} == ARCHITECTURES
    expected = load(tied)
    for missing in (None, []):
        edit_json(tied / "config.json", architectures=missing)
        assert find_corrections(tied) == {"architectures": ["Qwen2ForCausalLM"]}
        assert load(tied) == expected
    edit_json(tied / "config.json", architectures=["OtherForCausalLM"])
    assert find_corrections(tied) == {}


def test_stop_tokens_are_the_union_of_all_three_files(tiny: Path) -> None:
    folder = tiny
    assert read_stop_token_ids(folder) == (1,)
    edit_json(folder / "config.json", eos_token_id=7)
    edit_json(folder / "generation_config.json", eos_token_id=[9, 7, 1])
    assert read_stop_token_ids(folder) == (1, 7, 9)
    edit_json(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert read_stop_token_ids(folder) == (1,)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("bad", ["<eos>", "258", [1, "x"], True, -1, [1, -1], 1.5, 384, [1, 5000], {}])
def test_stop_tokens_that_are_no_tokens_of_the_model_are_refused(tiny: Path, name: str, bad: object) -> None:
    edit_json(tiny / name, eos_token_id=bad)
    with pytest.raises(DataError, match=rf"{name}: eos_token_id needs a token id .* vocab_size = 384, got"):
        read_stop_token_ids(tiny)


def test_a_stop_token_of_the_tokenizer_beyond_the_vocabulary_is_refused(tiny: Path) -> None:
    edit_json(tiny / "config.json", eos_token_id=None, vocab_size=1)
    (tiny / "generation_config.json").unlink()
    with expect_error(DataError, "tokenizer.json", "'<eos>'", "= 1", "[1]"):
        read_stop_token_ids(tiny)


def test_git_lfs_pointers_are_named(tied: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tied / name).write_text(POINTER)
    for read, name in ((read_header, "model.safetensors"), (read_json_object, "config.json")):
        with pytest.raises(DataError, match=rf"{name} is a Git LFS pointer, not the file itself: run `git lfs pull`"):
            read(tied / name)
    with expect_error(DataError, "config.json", "Git LFS"):
        read_hf_config(tied)


def test_companions_are_the_files_that_transformers_needs(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    kept = [
        *("generation_config.json", "tokenizer.json", "vocab.bpe", "merges.txt", "qwen.tiktoken", "tokenizer.model.v3"),
        *("chat_template.jinja", "chat_template.json", "added_tokens.json", "tokenization_x.py", "special.model"),
        "additional_chat_templates/rag.jinja",
    ]
    others = ["config.json", "model.safetensors", "model.safetensors.index.json", "README.md", "sub/other.json"]
    for name in (*kept, *others):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    target.mkdir()
    copy_companions(source, target)
    copied = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert copied == set(kept)
    copy_companions(target, target)
    assert all((target / name).read_text() == name for name in kept)
