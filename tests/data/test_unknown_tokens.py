"""Tokens that a tokenizer has and its model does not: added ones, for which the embedding has no row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken

from megarl.config.data import DataConfig
from megarl.data.demonstrations import load_demonstrations
from megarl.data.preference_pairs import load_preferences
from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import describe_unknown_token, load_tokenizer, read_vocab_size
from megarl.errors import DataError
from tests.data.conftest import Jsonl, Tokenizer
from tests.errors import expect_error

NEW = "<|new|>"


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a model with as many rows as its tokenizer has tokens, but for the added token `NEW`."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tokenizer = load_tokenizer(folder)
    edit_config(folder, vocab_size=len(tokenizer))
    tokenizer.add_tokens([AddedToken(NEW)])
    tokenizer.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


KNOWN = {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "11"}


@pytest.mark.parametrize("field", ["prompt", "response", "chosen", "rejected"])
def test_every_text_of_a_row_is_compared_with_the_vocabulary(jsonl: Jsonl, tokenizer: Tokenizer, field: str) -> None:
    config = DataConfig(path=str(jsonl(KNOWN, KNOWN | {field: f"1 {NEW} 2"})))
    loaders = {
        "prompts": lambda: load_prompts(config.resolved_sources[0], tokenizer, path=config.file, max_prompt_tokens=64),
        "demonstrations": lambda: load_demonstrations(config, tokenizer, max_tokens=64),
        "pairs": lambda: load_preferences(config, tokenizer, max_tokens=64),
    }
    reading = {"prompt": [*loaders], "response": ["demonstrations"]}.get(field, ["pairs"])
    size = len(tokenizer) - 1
    for name, load in loaders.items():
        if name in reading:
            message = rf"{config.file}:2: token {size} \('<\|new\|>'\) is not in the model's vocabulary.* {size} "
            with pytest.raises(DataError, match=message):
                load()
        else:
            load()


def test_tokens_that_the_model_has_are_accepted(jsonl: Jsonl, folder: Path) -> None:
    edit_config(folder, vocab_size=len(load_tokenizer(folder)))
    config = DataConfig(path=str(jsonl(KNOWN | {"prompt": NEW})))
    prompts = load_prompts(config.resolved_sources[0], load_tokenizer(folder), path=config.file, max_prompt_tokens=64)
    assert prompts[0].token_ids == (len(load_tokenizer(folder)) - 1,)


def test_an_end_of_sequence_token_beyond_the_vocabulary_is_refused(folder: Path) -> None:
    edit_config(folder, vocab_size=1)
    with expect_error(DataError, "1 ('<eos>')"):
        load_tokenizer(folder)


def test_the_vocabulary_of_a_language_model_beside_a_tower_is_that_of_text_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 5}, "vision_config": {}}))
    tokenizer: Any = SimpleNamespace(name_or_path=str(tmp_path))
    assert read_vocab_size(tokenizer) == 5


def test_ids_are_compared_with_both_ends_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    size = read_vocab_size(tokenizer)
    assert size == len(tokenizer) - 1
    assert describe_unknown_token(tokenizer, [0, size - 1], size) is None
    assert describe_unknown_token(tokenizer, [], size) is None
    assert describe_unknown_token(tokenizer, [10**6], None) is None
    for wrong in (size, 10**6, -1):
        message = describe_unknown_token(tokenizer, [0, wrong], size)
        assert message is not None
        assert message.startswith(f"token {wrong} ")
