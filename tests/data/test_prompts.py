"""Loading prompts: templates, special tokens, length limits, bad rows and the progress bar; storing them on disk."""

from __future__ import annotations

import datetime
import gc
import logging
import tracemalloc
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.batch.trajectory import Prompt
from megarl.config.data import DataConfig
from megarl.data import prompts
from megarl.data.prompts import StoredPrompts, load_prompts
from megarl.data.rows import track
from megarl.errors import AgentError, ConfigError, DataError
from megarl.rollout.environments.conversation import ChatRenderer
from tests.data.conftest import Jsonl, Tokenizer, read_jsonl
from tests.errors import expect_error
from tests.gsm8k import GSM8K_FOLDERS
from tests.rollout.environments.chat_templates import DAY


def load(path: Path, tokenizer: Tokenizer, max_prompt_tokens: int = 64, **config: object) -> Sequence[Prompt]:
    source = DataConfig(path=str(path), **config).resolved_sources[0]
    return load_prompts(source, tokenizer, path=str(path), max_prompt_tokens=max_prompt_tokens)


def test_prompts_of_the_demo(arithmetic: Path, tokenizer: Tokenizer) -> None:
    got = load(arithmetic / "train.jsonl", tokenizer)
    rows = read_jsonl(arithmetic / "train.jsonl")
    assert len(got) == 6000
    for i in (0, 1023, 1024, 5999):
        prompt, row = got[i], rows[i]
        assert (prompt.prompt_id, prompt.answer, prompt.row) == (f"train.jsonl:{i + 1}", row["answer"], row)
        assert prompt.text == row["prompt"] == tokenizer.decode(prompt.token_ids)
        assert list(prompt.token_ids) == tokenizer(prompt.text)["input_ids"]


def test_prompt_template_replaces_only_its_placeholder(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    template = r"{prompt} Answer in \boxed{}."
    (prompt,) = load(jsonl({"q": "How {many}?"}), tokenizer, fields={"prompt": "q"}, prompt_template=template)
    assert prompt.text == r"How {many}? Answer in \boxed{}."
    assert prompt.answer is None


def test_chat_template_is_applied_by_default(jsonl: Jsonl, chat_tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "T"}]
    first, second = load(jsonl({"prompt": "Hi"}, {"prompt": messages}), chat_tokenizer)
    assert first.text == "<user>Hi<eos><assistant>"
    assert second.text == "<system>S<eos><user>T<eos><assistant>"
    assert first.token_ids.count(chat_tokenizer.eos_token_id) == 1


def test_system_prompt_and_chat_template_never(jsonl: Jsonl, chat_tokenizer: Tokenizer) -> None:
    path = jsonl({"prompt": "Hi"})
    (prompt,) = load(path, chat_tokenizer, system_prompt="Be brief.")
    assert prompt.text == "<system>Be brief.<eos><user>Hi<eos><assistant>"
    (prompt,) = load(path, chat_tokenizer, chat_template="never")
    assert prompt.text == "Hi"


def test_bos_is_added_to_plain_prompts_only(jsonl: Jsonl, chat_tokenizer: Tokenizer) -> None:
    from tokenizers.processors import TemplateProcessing

    bos, path = chat_tokenizer.pad_token_id, jsonl({"prompt": "Hi"})
    with_bos = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", bos)])
    chat_tokenizer.backend_tokenizer.post_processor = with_bos
    (plain,) = load(path, chat_tokenizer, chat_template="never")
    (chat,) = load(path, chat_tokenizer)
    assert plain.token_ids[0] == bos
    assert bos not in chat.token_ids


@pytest.mark.parametrize("prompt", ["<pad>Hi", "Hi", "<pad><pad>Hi", "<eos>Hi", "H<pad>i", "<pad>", "a"])
def test_bos_is_not_added_to_prompts_that_begin_with_it(jsonl: Jsonl, tokenizer: Tokenizer, prompt: str) -> None:
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.pad_token_id
    with_bos = TemplateProcessing(single="<pad> $A <eos>", special_tokens=[("<pad>", bos), ("<eos>", 256)])
    plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    tokenizer.backend_tokenizer.post_processor = with_bos
    (got,) = load(jsonl({"prompt": prompt}), tokenizer)
    assert list(got.token_ids) == [*([] if prompt.startswith("<pad>") else [bos]), *plain, 256]


def test_reference_answers(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    values = ["#### 72", 72, 0.5, None, [1], "", " \n", True, float("inf"), -0.0, 1e22, 0, "nan"]
    got = load(jsonl(*({"prompt": "a", "answer": value} for value in values)), tokenizer)
    texts = ["#### 72", "72", "0.5", None, "1", None, None, None, None, "-0.0", "1e+22", "0", "nan"]
    assert [prompt.answer for prompt in got] == texts
    assert [prompt.row["answer"] for prompt in got] == values
    (got,) = load(jsonl({"prompt": "a", "answer": float("nan")}), tokenizer)
    assert got.answer is None


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_parquet_answers_have_the_decimals_that_were_written(tmp_path: Path, tokenizer: Tokenizer, kind: Any) -> None:
    values = [0.1, 72.0, -2.5, None, float("nan"), float("inf")]
    numbers = pa.array([None if value is None else np.float16(value) for value in values], pa.float16())
    numbers = numbers if kind == pa.float16() else pa.array(values, kind)
    table = pa.table({"prompt": ["a"] * len(values), "answer": numbers})
    pq.write_table(table, tmp_path / "rows.parquet")
    got = load(tmp_path / "rows.parquet", tokenizer)
    assert [prompt.answer for prompt in got] == ["0.1", "72.0", "-2.5", None, None, None]
    assert got[0].row["answer"] == 0.1
    assert got[3].row["answer"] is None


def test_parquet_answers_of_other_types_are_missing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    day = datetime.date(2024, 1, 1)
    for i, value in enumerate([Decimal("1.10"), b"7", day, datetime.datetime(2024, 1, 1), {"a": 1}]):
        pq.write_table(pa.table({"prompt": ["a"], "answer": [value]}), tmp_path / f"{i}.parquet")
        (got,) = load(tmp_path / f"{i}.parquet", tokenizer)
        assert (got.answer, got.row["answer"]) == (None, value)


TEXT = {"type": "text", "text": "Hi"}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": [TEXT]}, "Hi"),
        ({"content": [TEXT, TEXT | {"text": " you", "image_url": None}]}, "Hi you"),
        ({"content": ""}, ""),
        ({"content": None}, ""),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": []}, ""),
        ({"content": ["a", TEXT]}, "aHi"),
        ({"content": [TEXT | {"type": "input_text"}, {"type": "refusal", "refusal": "No"}]}, "HiNo"),
        ({"content": None, "tool_calls": [{"function": {}}]}, ""),
        ({"tool_calls": [{"function": {}}]}, ""),
    ],
)
def test_parts_of_text_are_joined(jsonl: Jsonl, chat_tokenizer: Tokenizer, message: Any, text: str) -> None:
    (got,) = load(jsonl({"prompt": [{"role": "user", **message}]}), chat_tokenizer)
    assert got.text == f"<user>{text}<eos><assistant>"


@pytest.mark.parametrize(
    "message",
    [
        {"content": 3},
        {"content": True},
        {"content": {"type": "text", "text": "a"}},
        {"content": ["a", 3]},
        {"content": [TEXT, {"type": "image"}]},
        {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"content": [{"type": "text", "text": None}]},
        {"content": [{"type": "text"}]},
        {"tool_calls": []},
        {},
    ],
)
def test_messages_without_text_are_refused_by_line(jsonl: Jsonl, chat_tokenizer: Tokenizer, message: Any) -> None:
    rows = jsonl({"prompt": "a"}, {"prompt": [{"role": "user", **message}]})
    with expect_error(DataError, "rows.jsonl:2", "'prompt'", "{'role'"):
        load(rows, chat_tokenizer)


class TemplateError(BaseException):
    """As the exceptions of timeouts in some packages, no `Exception`."""


@pytest.mark.parametrize("error", [TypeError("can only concatenate"), SystemExit(3), TemplateError("\ud800 late")])
def test_whatever_a_template_raises_is_reported_by_line(
    jsonl: Jsonl, chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(chat_tokenizer, "apply_chat_template", fail)
    with pytest.raises(
        DataError, match=rf"rows.jsonl:1: the tokenizer's chat .* {type(error).__name__}: .* \(at "
    ) as e:
        load(jsonl({"prompt": "a"}), chat_tokenizer)
    str(e.value).encode()
    with pytest.raises(AgentError, match=f"refuses messages of the roles user: {type(error).__name__}"):
        ChatRenderer(chat_tokenizer, DAY).render([{"role": "user", "content": "a"}])


def test_overlong_prompt_is_an_error_that_shows_the_numbers(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    path = jsonl({"prompt": "1"}, {"prompt": "123456"})
    message = r"rows.jsonl:2: the prompt has 6 tokens, 1 more than data.max_prompt_tokens = 5; .*drop"
    with pytest.raises(DataError, match=message):
        load(path, tokenizer, 5)
    assert len(load(path, tokenizer, 6)) == 2


def test_dropped_prompts_are_counted_in_the_log(jsonl: Jsonl, tokenizer: Tokenizer, caplog: Any) -> None:
    path = jsonl({"prompt": "1"}, {"prompt": "123456"}, {"prompt": "12"})
    with caplog.at_level(logging.WARNING, logger=prompts.__name__):
        got = load(path, tokenizer, 5, overlong_prompts="drop")
    assert [p.prompt_id for p in got] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert "rows.jsonl: dropped 1 of 3 rows" in caplog.text
    with expect_error(DataError, "rows.jsonl", "3"):
        load(jsonl(*[{"prompt": "123456"}] * 3), tokenizer, 5, overlong_prompts="drop")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "a"}, r"rows.jsonl:1: field 'prompt' \(data.fields.prompt\) is missing"),
        ({"prompt": ""}, r"rows.jsonl:1: .* holds no tokens"),
        ({"prompt": 3}, r"rows.jsonl:1: .* needs a string or a list of messages, got int"),
        ({"prompt": []}, r"rows.jsonl:1: .* got an empty list"),
        ({"prompt": [{"content": "a"}]}, r"rows.jsonl:1: .* needs messages \{role, content\}"),
        ({"prompt": [{"role": 3, "content": "a"}]}, r"rows.jsonl:1: .* needs messages \{role, content\}"),
        ({"prompt": [{"role": "user", "content": "a"}]}, r"rows.jsonl:1: .* need a chat template"),
    ],
)
def test_bad_rows_are_reported(jsonl: Jsonl, tokenizer: Tokenizer, row: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(jsonl(row), tokenizer)


def test_bad_configurations_are_reported(jsonl: Jsonl, tokenizer: Tokenizer, chat_tokenizer: Tokenizer) -> None:
    path = jsonl({"prompt": [{"role": "system", "content": "a"}]})
    with expect_error(ConfigError, "data.prompt_template", "{prompt}"):
        load(path, tokenizer, prompt_template="none")
    with expect_error(ConfigError, "data.system_prompt", "data.chat_template"):
        load(path, chat_tokenizer, system_prompt="S", chat_template="never")
    with expect_error(DataError, "data.chat_template"):
        load(path, tokenizer, chat_template="always")
    with expect_error(DataError, "data.system_prompt"):
        load(path, tokenizer, system_prompt="S")
    with expect_error(DataError, "rows.jsonl:1", "data.system_prompt", "row's"):
        load(path, chat_tokenizer, system_prompt="S")
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with expect_error(DataError, "rows.jsonl:1", "tokenizer's"):
        load(path, chat_tokenizer)


@pytest.mark.parametrize("source", GSM8K_FOLDERS)
def test_gsm8k_as_published(source: tuple[Path, int], tokenizer: Tokenizer) -> None:
    folder, num_rows = source
    rows = read_jsonl(folder / "train.jsonl")
    got = load(folder / "train.jsonl", tokenizer, 2000, fields={"prompt": "question", "answer": "answer"})
    assert len(got) == num_rows
    assert [(p.text, p.answer) for p in got] == [(row["question"], row["answer"]) for row in rows]
    assert all(p.answer is not None and "#### " in p.answer for p in got)


def make_prompts(count: int, num_tokens: int = 5) -> Iterator[Prompt]:
    """Yield prompts whose rows have values of JSON and of Parquet."""
    for i in range(count):
        row = {
            "question": f"how many? {i} \ud800",
            "nested": [{"a": None, "b": 1e-300}, float("inf"), 2**70],
            "date": datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
            "price": Decimal("1.10"),
            "image": b"\x00\xff",
        }
        tokens, answer = tuple(range(i, i + num_tokens)), str(i) if i else None
        yield Prompt(prompt_id=f"d.parquet:{i + 1}", text=f"{i}?", token_ids=tokens, row=row, answer=answer)


def test_prompts_are_returned_as_stored_in_any_order(tmp_path: Path) -> None:
    made, stored = list(make_prompts(50)), StoredPrompts.store(make_prompts(50), tmp_path / "new")
    assert len(stored) == 50
    assert list(stored) == made
    assert [stored[i] for i in (49, 0, -1, 7, 7)] == [made[i] for i in (49, 0, -1, 7, 7)]
    part = stored[10:20][2:]
    assert (list(part), len(part)) == (made[12:20], 8)
    with pytest.raises(IndexError):
        stored[50]
    assert list((tmp_path / "new").iterdir()) == []
    assert list(StoredPrompts.store([])) == []


def test_memory_of_a_prompt_is_below_its_budget() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        stored = StoredPrompts.store(make_prompts(2000, num_tokens=50))
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert growth / len(stored) < 100  # a buffer of the file included; the tokens alone would take 400


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with expect_error(DataError, "file/run", "Not"):
        StoredPrompts.store(make_prompts(1), tmp_path / "file" / "run")


def test_batches_pass_through_and_nothing_is_printed_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [[1, 2], [3]]
    assert list(track(batches, "counting", quiet_seconds=0.0)) == batches
    assert capsys.readouterr() == ("", "")


def test_long_work_shows_the_row_count_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    assert list(track([[1, 2], [3]], "counting", quiet_seconds=0.0)) == [[1, 2], [3]]
    assert "3 rows" in capsys.readouterr().err


def test_errors_pass_through_the_progress_bar() -> None:
    def failing():
        yield [1]
        raise KeyError("x")

    with pytest.raises(KeyError):
        list(track(failing(), "counting"))
