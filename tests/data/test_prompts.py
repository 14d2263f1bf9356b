"""Loading prompts: templates, special tokens, length limits and bad rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config.data import DataConfig
from megarl.data import prompts
from megarl.data.prompts import load_prompts
from megarl.errors import ConfigError, DataError
from tests.gsm8k import GSM8K_FOLDERS


def test_prompts_of_the_demo(arithmetic: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = str(arithmetic / "train.jsonl")
    got = load_prompts(DataConfig(path=path).resolved_sources[0], tokenizer, path=path, max_prompt_tokens=64)
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert len(got) == 6000
    for i in (0, 1023, 1024, 5999):
        prompt = got[i]
        assert prompt.prompt_id == f"train.jsonl:{i + 1}"
        assert prompt.text == rows[i]["prompt"] == tokenizer.decode(prompt.token_ids)
        assert prompt.answer == rows[i]["answer"]
        assert prompt.row == rows[i]
        assert list(prompt.token_ids) == tokenizer(prompt.text)["input_ids"]


def test_prompt_template_replaces_only_its_placeholder(
    jsonl: Callable[..., Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    path = str(jsonl({"q": "How {many}?"}))
    config = DataConfig(path=path, fields={"prompt": "q"}, prompt_template=r"{prompt} Answer in \boxed{}.")
    (prompt,) = load_prompts(config.resolved_sources[0], tokenizer, path=path, max_prompt_tokens=64)
    assert prompt.text == r"How {many}? Answer in \boxed{}."
    assert prompt.answer is None


def test_chat_template_is_applied_by_default(
    jsonl: Callable[..., Path], chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    path = str(
        jsonl({"prompt": "Hi"}, {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "T"}]})
    )
    first, second = load_prompts(
        DataConfig(path=path).resolved_sources[0], chat_tokenizer, path=path, max_prompt_tokens=64
    )
    assert first.text == "<user>Hi<eos><assistant>"
    assert second.text == "<system>S<eos><user>T<eos><assistant>"
    assert first.token_ids.count(chat_tokenizer.eos_token_id) == 1


def test_system_prompt_and_chat_template_never(
    jsonl: Callable[..., Path], chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    path = str(jsonl({"prompt": "Hi"}))
    (prompt,) = load_prompts(
        DataConfig(path=path, system_prompt="Be brief.").resolved_sources[0],
        chat_tokenizer,
        path=path,
        max_prompt_tokens=64,
    )
    assert prompt.text == "<system>Be brief.<eos><user>Hi<eos><assistant>"
    (prompt,) = load_prompts(
        DataConfig(path=path, chat_template="never").resolved_sources[0],
        chat_tokenizer,
        path=path,
        max_prompt_tokens=64,
    )
    assert prompt.text == "Hi"


def test_bos_is_added_to_plain_prompts_only(
    jsonl: Callable[..., Path], chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    from tokenizers.processors import TemplateProcessing

    chat_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", chat_tokenizer.pad_token_id)]
    )
    bos, path = chat_tokenizer.pad_token_id, str(jsonl({"prompt": "Hi"}))
    (plain,) = load_prompts(
        DataConfig(path=path, chat_template="never").resolved_sources[0],
        chat_tokenizer,
        path=path,
        max_prompt_tokens=64,
    )
    (chat,) = load_prompts(DataConfig(path=path).resolved_sources[0], chat_tokenizer, path=path, max_prompt_tokens=64)
    assert plain.token_ids[0] == bos
    assert bos not in chat.token_ids


@pytest.mark.parametrize(
    ("value", "answer"), [("#### 72", "#### 72"), (72, "72"), (0.5, "0.5"), (None, None), ([1], None)]
)
def test_reference_answers(
    jsonl: Callable[..., Path], tokenizer: PreTrainedTokenizerBase, value: object, answer: str | None
) -> None:
    path = str(jsonl({"prompt": "a", "answer": value}))
    (prompt,) = load_prompts(DataConfig(path=path).resolved_sources[0], tokenizer, path=path, max_prompt_tokens=64)
    assert prompt.answer == answer
    assert prompt.row["answer"] == value


def test_overlong_prompt_is_an_error_that_shows_the_numbers(
    jsonl: Callable[..., Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    path = str(jsonl({"prompt": "1"}, {"prompt": "123456"}))
    with pytest.raises(
        DataError, match=r"rows.jsonl:2: the prompt has 6 tokens, 1 more than data.max_prompt_tokens = 5; .*drop"
    ):
        load_prompts(DataConfig(path=path).resolved_sources[0], tokenizer, path=path, max_prompt_tokens=5)
    assert len(load_prompts(DataConfig(path=path).resolved_sources[0], tokenizer, path=path, max_prompt_tokens=6)) == 2


def test_dropped_prompts_are_counted_in_the_log(
    jsonl: Callable[..., Path], tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(jsonl({"prompt": "1"}, {"prompt": "123456"}, {"prompt": "12"}))
    config = DataConfig(path=path, overlong_prompts="drop")
    with caplog.at_level(logging.WARNING, logger=prompts.__name__):
        got = load_prompts(config.resolved_sources[0], tokenizer, path=path, max_prompt_tokens=5)
    assert [p.prompt_id for p in got] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert "rows.jsonl: dropped 1 of 3 rows" in caplog.text
    with pytest.raises(DataError, match=r"rows.jsonl: no row is left: all 3 prompts"):
        load_prompts(
            config.resolved_sources[0], tokenizer, path=str(jsonl(*[{"prompt": "123456"}] * 3)), max_prompt_tokens=5
        )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, r"rows.jsonl:1: field 'prompt' \(data.fields.prompt\) is missing"),
        ({"prompt": ""}, r"rows.jsonl:1: .* holds no tokens"),
        ({"prompt": 3}, r"rows.jsonl:1: .* needs a string or a list of messages, got int"),
        ({"prompt": []}, r"rows.jsonl:1: .* got an empty list"),
        ({"prompt": [{"content": "a"}]}, r"rows.jsonl:1: .* needs messages \{role, content\}"),
        ({"prompt": [{"role": "user", "content": "a"}]}, r"rows.jsonl:1: .* need a chat template"),
    ],
)
def test_bad_rows_are_reported(
    jsonl: Callable[..., Path], tokenizer: PreTrainedTokenizerBase, row: object, message: str
) -> None:
    path = str(jsonl(row))
    with pytest.raises(DataError, match=message):
        load_prompts(DataConfig(path=path).resolved_sources[0], tokenizer, path=path, max_prompt_tokens=64)


def test_bad_configurations_are_reported(
    jsonl: Callable[..., Path], tokenizer: PreTrainedTokenizerBase, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    path = str(jsonl({"prompt": [{"role": "system", "content": "a"}]}))

    def load(tok: PreTrainedTokenizerBase, **config: object) -> object:
        return load_prompts(DataConfig(path=path, **config).resolved_sources[0], tok, path=path, max_prompt_tokens=64)

    with pytest.raises(ConfigError, match=r"data.prompt_template needs \{prompt\}"):
        load(tokenizer, prompt_template="none")
    with pytest.raises(ConfigError, match=r"data.system_prompt needs a chat template, got data.chat_template: never"):
        load(chat_tokenizer, system_prompt="S", chat_template="never")
    with pytest.raises(DataError, match=r"data.chat_template: always needs a tokenizer with a chat template"):
        load(tokenizer, chat_template="always")
    with pytest.raises(DataError, match=r"data.system_prompt needs a tokenizer with a chat template"):
        load(tokenizer, system_prompt="S")
    with pytest.raises(DataError, match=r"rows.jsonl:1: data.system_prompt would be the row's second"):
        load(chat_tokenizer, system_prompt="S")
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"rows.jsonl:1: the tokenizer's chat template refuses .*roles must alternate"):
        load(chat_tokenizer)


@pytest.mark.parametrize("source", GSM8K_FOLDERS)
def test_gsm8k_as_published(source: tuple[Path, int], tokenizer: PreTrainedTokenizerBase) -> None:
    folder, num_rows = source
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    config = DataConfig(path=str(folder / "train.jsonl"), fields={"prompt": "question", "answer": "answer"})
    got = load_prompts(config.resolved_sources[0], tokenizer, path=config.path, max_prompt_tokens=2000)
    assert len(got) == num_rows
    assert [(p.text, p.answer) for p in got] == [(row["question"], row["answer"]) for row in rows]
    assert all(p.answer is not None and "#### " in p.answer for p in got)
