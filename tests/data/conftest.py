"""Fixtures: the arithmetic demo data, a tiny model, its tokenizers and JSONL files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.data.demo_arithmetic import write_arithmetic
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.data.tokenizer import load_tokenizer

Jsonl = Callable[..., Path]
Tokenizer = PreTrainedTokenizerBase

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def read_jsonl(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data files of the arithmetic demo."""
    directory = tmp_path_factory.mktemp("arithmetic")
    write_arithmetic(directory, seed=0)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, arithmetic: Path) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    texts = [row["prompt"] + row["response"] for row in read_jsonl(arithmetic / "sft.jsonl")]
    write_tiny_model(directory, texts, seed=0)
    return directory


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(tiny_model)


@pytest.fixture
def chat_tokenizer(tiny_model: Path) -> Tokenizer:
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def jsonl(tmp_path: Path) -> Jsonl:
    """Return a function that writes rows (objects, or raw text for malformed ones) to a file."""

    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write
