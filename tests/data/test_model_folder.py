"""Model folders: tokenizers, their stop tokens, broken folders, and the tiny model of tests and demo."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.config.data import DataConfig
from megarl.data.chat_template import PromptTemplate
from megarl.data.rows import read_rows
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.data.token_file import TokenFile
from megarl.data.tokenizer import TOKENIZER_CLASSES, load_tokenizer
from megarl.errors import DataError
from megarl.model_files.model_config import copy_companions
from megarl.rollout.environments.conversation import require_chat_template
from tests.errors import expect_error
from tests.rollout.environments.chat_templates import DAY


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny model that a test may modify."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def edit_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_malformed_files_are_reported(model: Path, name: str) -> None:
    for content, problem in (('{"a": ', "is not valid JSON"), ("[]", "needs a JSON object, got list")):
        (model / name).write_text(content)
        with pytest.raises(DataError, match=f"{name} {problem}"):
            load_tokenizer(model)


def test_folders_without_a_usable_tokenizer_are_refused(model: Path, tmp_path: Path) -> None:
    with expect_error(DataError, "nowhere", "folder"):
        load_tokenizer(tmp_path / "nowhere")
    with expect_error(DataError, "tokenizer.json"):
        load_tokenizer(tmp_path)
    edit_json(model / "tokenizer_config.json", eos_token=None)
    with expect_error(DataError, "eos_token", "tokenizer_conf"):
        load_tokenizer(model)


def test_a_config_that_transformers_rejects_is_reported(model: Path) -> None:
    edit_json(model / "tokenizer_config.json", auto_map={})  # only AutoTokenizer can load it, which reads config.json
    edit_json(model / "config.json", layer_types=["full_attention"], num_hidden_layers=2)
    with expect_error(DataError, "StrictDataclass", "`num_hidden_layers`"):
        load_tokenizer(model)


def test_an_inconsistent_tokenizer_is_reported(model: Path) -> None:
    tree = json.loads((model / "tokenizer.json").read_text())["model"]
    edit_json(model / "tokenizer.json", model=tree | {"merges": [*tree["merges"], ["zzzz", "qqqq"]]})
    with expect_error(DataError, "vocabulary", "tokenizer"):
        load_tokenizer(model)


def test_vocabulary_rows_without_a_token_decode_to_an_empty_string(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    assert len(tokenizer) < 383
    assert tokenizer.decode([383, *tokenizer("9")["input_ids"], 383]) == "9"


@pytest.mark.parametrize(("family", "name"), TOKENIZER_CLASSES)
@pytest.mark.parametrize("suffix", ["", "Fast"])
def test_the_tokenizer_is_the_one_that_transformers_chooses(model: Path, family: str, name: str, suffix: str) -> None:
    edit_json(model / "tokenizer_config.json", tokenizer_class=name + suffix)
    edit_json(model / "config.json", model_type=family)
    chosen, loaded = AutoTokenizer.from_pretrained(model), load_tokenizer(model)
    assert type(loaded) is type(chosen)
    assert loaded.get_vocab() == chosen.get_vocab()
    assert loaded.special_tokens_map == chosen.special_tokens_map
    assert loaded.encode("Ben has 12 pens.") == chosen.encode("Ben has 12 pens.")


def test_other_tokenizers_are_left_to_transformers(model: Path) -> None:
    edit_json(model / "config.json", model_type="qwen2")  # AutoTokenizer replaces the class that the folder names
    assert type(load_tokenizer(model)) is type(AutoTokenizer.from_pretrained(model))


def test_a_known_tokenizer_needs_no_torch(tiny_model: Path) -> None:
    load = f"load_tokenizer({str(tiny_model)!r}).encode('12')"
    code = f"from megarl.data.tokenizer import load_tokenizer; {load}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_transformers_loads_the_model_and_generates(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert 480_000 < sum(p.numel() for p in model.parameters()) < 500_000
    assert model.dtype == torch.float32
    assert 300 < len(tokenizer) <= model.config.vocab_size == 384
    ids = tokenizer("Mia has 8 pens.", return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert out.shape[1] <= ids.shape[1] + 3


def test_the_tokenizer_round_trips_any_text_and_splits_digits(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for text in ("8+3=11;11-2=9 #### 9", " two  spaces\n", "naïve 日本 🙂 don 't ."):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert len(tokenizer("12345")["input_ids"]) == 5
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<eos>")
    assert tokenizer("<eos>")["input_ids"] == [tokenizer.eos_token_id]


def test_the_seed_determines_the_weights_and_global_state_is_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tiny_model(tmp_path / name, ["some text"], seed)
    assert torch.equal(torch.rand(3), expected)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


def test_sizes_are_arguments(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, ["text"], 0, hidden_size=32, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=8)
    config = json.loads((tmp_path / "config.json").read_text())
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [config[k] for k in sizes] == [32, 4, 8, 4, 8]
    with expect_error(DataError, "256", "2 = 258", "200"):
        write_tiny_model(tmp_path, ["text"], 0, vocab_size=200)
    with expect_error(DataError, "needs", "texts"):
        write_tiny_model(tmp_path, [], 0)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1234567\n"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"])
def test_git_lfs_pointers_of_a_tokenizer_are_named(model: Path, name: str) -> None:
    (model / name).write_text(POINTER)
    with pytest.raises(DataError, match=rf"model/{name} is a Git LFS pointer, .* run `git lfs pull`"):
        load_tokenizer(model)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_git_lfs_pointers_of_data_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POINTER)
    with expect_error(DataError, str(tmp_path / name), "Git LFS"):
        read_rows(tmp_path / name)
    with expect_error(DataError, str(tmp_path / name), "Git LFS"):
        TokenFile(path=tmp_path / name, vocab_size=9, max_positions=9).check()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_any_exception_of_transformers_is_one_sentence(model: Path, key: str) -> None:
    edit_json(model / "tokenizer_config.json", auto_map={})  # only AutoTokenizer can load it, which reads config.json
    edit_json(model / "config.json", **{"dtype": None, key: "auto"})
    with pytest.raises(DataError, match=r"^\S*model: the tokenizer cannot be loaded: AttributeError: [^\n]*auto'$"):
        load_tokenizer(model)


def save_templates(model: Path, *names: str) -> None:
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = {
        name: f"[{name}]{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}" for name in names
    }
    tokenizer.save_pretrained(model)


def test_several_chat_templates_need_a_default(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    source = DataConfig(path=str(tmp_path / "rows.jsonl")).resolved_sources[0]
    save_templates(model, "rag", "tool_use")
    with expect_error(DataError, "rag, tool_use", "data.chat_template_name"):
        PromptTemplate(source.config, load_tokenizer(model), DAY)
    with expect_error(DataError, "rag, tool_use", "data.chat_template_name"):
        require_chat_template(load_tokenizer(model), DAY, forks="forbid", refuses_forks=None)
    PromptTemplate(source.config.model_copy(update={"chat_template": "never"}), load_tokenizer(model), DAY)
    save_templates(model, "default", "rag")
    (row,) = read_rows(source.config.path)
    assert PromptTemplate(source.config, load_tokenizer(model), DAY).render(row) == "[default]1"


def test_copied_companions_render_every_chat_template(model: Path, tmp_path: Path) -> None:
    save_templates(model, "default", "rag", "tool_use")
    (tmp_path / "copy").mkdir()
    copy_companions(model, tmp_path / "copy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert set(tokenizer.chat_template) == {"default", "rag", "tool_use"}
    for name in tokenizer.chat_template:
        messages = [{"role": "user", "content": "1"}]
        assert tokenizer.apply_chat_template(messages, chat_template=name, tokenize=False) == f"[{name}]1"
