"""Loading demonstrations: tokens, loss masks and bad rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.config.data import DataConfig
from megarl.data.demonstrations import load_demonstrations
from megarl.data.prompts import load_prompts
from megarl.errors import DataError
from tests.data.conftest import Jsonl, Tokenizer


def test_the_loss_mask_covers_response_and_eos(arithmetic: Path, tokenizer: Tokenizer) -> None:
    config = DataConfig(path=str(arithmetic / "sft.jsonl"))
    got = load_demonstrations(config, tokenizer, max_tokens=64)
    prompts = load_prompts(config.resolved_sources[0], tokenizer, path=config.file, max_prompt_tokens=64)
    assert len(got) == len(prompts) == 6000
    for i, (trajectory, prompt) in enumerate(zip(got, prompts, strict=True)):
        n = len(prompt.token_ids)
        assert trajectory.prompt_id == prompt.prompt_id
        assert trajectory.group_id == i
        assert trajectory.token_ids[:n].tolist() == list(prompt.token_ids)
        assert trajectory.prompt_length == n
        assert trajectory.loss_mask[n:].all()
        response = trajectory.token_ids[trajectory.loss_mask]
        assert response[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(response[:-1]) == prompt.row["response"]
    first = got[0]
    assert (first.token_ids.dtype, first.loss_mask.dtype) == (np.int32, np.bool_)
    assert (first.logprobs == 0).all()
    assert (first.policy_versions == -1).all()


def test_chat_demonstration(jsonl: Jsonl, chat_tokenizer: Tokenizer) -> None:
    path = str(jsonl({"prompt": "Hi", "response": "Yo"}))
    (got,) = load_demonstrations(DataConfig(path=path), chat_tokenizer, max_tokens=64)
    assert chat_tokenizer.decode(got.token_ids) == "<user>Hi<eos><assistant>Yo<eos>"
    assert chat_tokenizer.decode(got.token_ids[got.loss_mask]) == "Yo<eos>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "answer": "b"}, r"rows.jsonl:1: a demonstration needs field 'response' \(data.fields.resp"),
        ({"prompt": "a", "response": ""}, r"rows.jsonl:1: field 'response' \(data.fields.response\) is empty"),
        ({"prompt": "a", "response": 1}, r"rows.jsonl:1: .*data.fields.response\) needs a string, got int"),
        ({"response": "b"}, r"rows.jsonl:1: field 'prompt' \(data.fields.prompt\) is missing"),
    ],
)
def test_bad_rows_are_reported(jsonl: Jsonl, tokenizer: Tokenizer, row: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_demonstrations(DataConfig(path=str(jsonl(row))), tokenizer, max_tokens=64)


def test_the_length_limit_counts_prompt_response_and_eos(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    path = str(jsonl({"prompt": "123", "response": "45"}, {"prompt": "1", "response": "2"}))
    assert len(load_demonstrations(DataConfig(path=path), tokenizer, max_tokens=6)) == 2
    with pytest.raises(DataError, match=r"rows.jsonl:1: the demonstration has 6 tokens, 1 more than .* = 5"):
        load_demonstrations(DataConfig(path=path), tokenizer, max_tokens=5)
    (kept,) = load_demonstrations(DataConfig(path=path, overlong_prompts="drop"), tokenizer, max_tokens=5)
    assert kept.prompt_id == "rows.jsonl:2"
