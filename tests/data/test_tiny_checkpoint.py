"""The tiny model: loading with transformers, its tokenizer and determinism."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.errors import DataError


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
    with pytest.raises(DataError, match=r"256 \+ 2 = 258, got 200"):
        write_tiny_model(tmp_path, ["text"], 0, vocab_size=200)
    with pytest.raises(DataError, match=r"needs texts"):
        write_tiny_model(tmp_path, [], 0)
