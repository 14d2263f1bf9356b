"""Shapes of RL prompts that people bring: text, answers and tokens of hand-made rows, and what is refused.

The expected text is what the chat template of the tokenizer gives for messages that are written out by hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.batch.trajectory import Prompt
from megarl.config.data import DataConfig
from megarl.data.prompts import load_prompts
from megarl.errors import DataError
from tests.data.chat_templates import CHATML, make_tokenizer
from tests.data.conftest import Jsonl, Tokenizer
from tests.errors import expect_error


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FLAT_ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
ASKED = [{"role": "system", "content": "Be brief"}, user("2+2?")]

SHAPES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], tuple[str, ...], list[dict[str, Any]]]] = {
    # row, messages, answers, tools
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": ASKED,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"split": "train", "index": 0},
        },
        ASKED,
        ("4",),
        [],
    ),
    "slime": (
        {"prompt": ASKED, "label": "4", "metadata": {"level": 1}, "tools": [ADD]},
        ASKED,
        ("4",),
        [ADD],
    ),
    "slime, tools as text": ({"prompt": "2+2?", "label": 4, "tools": json.dumps([ADD])}, [user("2+2?")], ("4",), [ADD]),
    "verifiers": ({"question": "2+2?", "answer": "4", "info": {"unit": "none"}}, [user("2+2?")], ("4",), []),
    "verifiers, answer in info": ({"prompt": ASKED, "info": {"answer": "4"}}, ASKED, ("4",), []),
    "verifiers, info as text": ({"prompt": ASKED, "info": '{"answer": "4"}'}, ASKED, ("4",), []),
    "TRL": ({"prompt": [user("2+2?")], "ground_truth": "4"}, [user("2+2?")], ("4",), []),
    "NeMo-Gym": (
        {"responses_create_params": {"input": ASKED, "tools": [FLAT_ADD]}, "expected_answer": "4"},
        ASKED,
        ("4",),
        [ADD],
    ),
    "NeMo-Gym, text": (
        {"responses_create_params": {"input": "2+2?"}, "expected_answer": 4},
        [user("2+2?")],
        ("4",),
        [],
    ),
    "OpenAI messages": ({"messages": ASKED, "answer": "4"}, ASKED, ("4",), []),
    "parts of text": (
        {"messages": [ASKED[0], user([{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}])]},  # type: ignore[arg-type]
        ASKED,
        (),
        [],
    ),
    "ShareGPT": (
        {"conversations": [{"from": "system", "value": "Be brief"}, {"from": "human", "value": "2+2?"}]},
        ASKED,
        (),
        [],
    ),
    "Alpaca": ({"instruction": "Add", "input": "2+2", "output": "4"}, [user("Add\n2+2")], ("4",), []),
    "Alpaca without input": ({"instruction": "Add 2+2", "input": "", "output": "4"}, [user("Add 2+2")], ("4",), []),
    "problem": ({"problem": "2+2?", "answer": 4, "solution": "it is 4"}, [user("2+2?")], ("4",), []),
    "several answers": (
        {"question": "2+2?", "answer": ["4", "", "four", None, 4, 4.0]},
        [user("2+2?")],
        ("4", "four", "4.0"),
        [],
    ),
    "empty lists of media": ({"prompt": "2+2?", "images": [], "videos": None}, [user("2+2?")], (), []),
}


@pytest.fixture(scope="module")
def chatml() -> Tokenizer:
    return make_tokenizer(CHATML)


def load(path: Path, tokenizer: Tokenizer, **config: object) -> Sequence[Prompt]:
    source = DataConfig(path=str(path), **config).resolved_sources[0]
    return load_prompts(source, tokenizer, path=str(path), max_prompt_tokens=500)


def rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    text = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


IN_PARQUET = [shape for shape in SHAPES if shape not in ("several answers", "parts of text", "empty lists of media")]
"""The shapes whose columns have one type."""


@pytest.mark.parametrize(
    ("shape", "suffix"), [*((shape, "jsonl") for shape in SHAPES), *((shape, "parquet") for shape in IN_PARQUET)]
)
def test_prompts_are_those_of_the_chat_template(shape: str, suffix: str, tmp_path: Path, chatml: Tokenizer) -> None:
    row, messages, answers, tools = SHAPES[shape]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    (prompt,) = load(path, chatml)
    assert prompt.text == rendered(chatml, messages, tools)
    assert list(prompt.token_ids) == chatml(prompt.text, add_special_tokens=False)["input_ids"]
    assert prompt.answers == answers
    assert prompt.answer == (answers[0] if answers else None)
    assert prompt.row == row


def test_named_fields_take_precedence(jsonl: Jsonl, chatml: Tokenizer) -> None:
    row = {"prompt": "a", "question": "2+2?", "answer": "5", "extra": {"right": [{"value": "4"}]}, "a.b": "dots"}
    path = jsonl(row)
    (prompt,) = load(path, chatml, fields={"prompt": "question", "answer": "extra.right.0.value"})
    assert (prompt.text, prompt.answers) == (rendered(chatml, [user("2+2?")], []), ("4",))
    (prompt,) = load(path, chatml, fields={"prompt": "a.b"})
    assert prompt.text == rendered(chatml, [user("dots")], [])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{context}\n{question}", "Facts\n2+2?"),
        (r"{question} in \boxed{answer} or \boxed{}", r"2+2? in \boxed{answer} or \boxed{}"),
        ("{question}{nothing}", "2+2?"),
        ("{meta.level}: {prompt}", "3: 2+2?"),
        ('{prompt} as {"json": 1}', '2+2? as {"json": 1}'),
    ],
)
def test_templates_with_columns(template: str, text: str, jsonl: Jsonl, chatml: Tokenizer) -> None:
    row = {"question": "2+2?", "context": "Facts", "nothing": None, "meta": {"level": 3}, "answer": "4"}
    (prompt,) = load(jsonl(row), chatml, prompt_template=template)
    assert prompt.text == rendered(chatml, [user(text)], [])


def test_columns_in_a_prompt_are_not_replaced(jsonl: Jsonl, chatml: Tokenizer) -> None:
    (prompt,) = load(jsonl({"prompt": "{answer}", "answer": "4"}), chatml, prompt_template="{prompt}!")
    assert prompt.text == rendered(chatml, [user("{answer}!")], [])


def test_last_turn_of_the_assistant_is_refused_or_left_out(jsonl: Jsonl, chatml: Tokenizer) -> None:
    path = jsonl({"messages": [*ASKED, {"role": "assistant", "content": "4"}]})
    with expect_error(DataError, "rows.jsonl:1", "'messages'", "data.last_assistant"):
        load(path, chatml)
    (prompt,) = load(path, chatml, last_assistant="drop")
    assert prompt.text == rendered(chatml, ASKED, [])


@pytest.mark.parametrize(
    ("row", "config", "message"),
    [
        (
            {"prompt": "a"},
            {"fields": {"answer": "x.truth"}},
            r"no row has field 'x.truth' \(data.fields.answer\); the columns are 'prompt'",
        ),
        ({"prompt": "a", "x": {"y": 1}}, {"fields": {"answer": "x.truth"}}, "no row has field 'x.truth'"),
        ({"q": "a"}, {}, r"rows.jsonl:1: field 'prompt' \(data.fields.prompt\) is missing; the row has 'q'"),
        ({"q": "a"}, {"fields": {"prompt": "x.y"}}, "rows.jsonl:1: field 'x.y'"),
        ({"prompt": "a"}, {"prompt_template": "{prompt} {con}"}, r"rows.jsonl:1: data.prompt_template names \{con\}"),
        ({"prompt": "<image> a", "images": ["x.png"]}, {}, "rows.jsonl:1: field 'images'"),
        ({"prompt": "a", "videos": [{"url": "x"}]}, {}, "rows.jsonl:1: field 'videos'"),
        ({"prompt": [user([{"type": "image_url"}])]}, {}, "rows.jsonl:1: .* parts of type text"),  # type: ignore[arg-type]
        ({"prompt": "a", "tools": "no json"}, {}, r"rows.jsonl:1: field 'tools' \(data.fields.tools\) needs a list"),
        ({"instruction": "a", "input": 3}, {}, "rows.jsonl:1: field 'input' needs a string, got int"),
    ],
)
def test_refusals_name_place_and_column(
    row: dict[str, Any], config: dict[str, Any], message: str, jsonl: Jsonl, chatml: Tokenizer
) -> None:
    with pytest.raises(DataError, match=message):
        load(jsonl(row), chatml, **config)


def test_tools_that_the_template_does_not_write_are_refused(jsonl: Jsonl, chat_tokenizer: Tokenizer) -> None:
    with expect_error(DataError, "rows.jsonl:1", "tools"):
        load(jsonl({"prompt": "a", "tools": [ADD]}), chat_tokenizer)


def test_an_answer_that_some_rows_have_is_optional(jsonl: Jsonl, chatml: Tokenizer) -> None:
    path = jsonl({"prompt": "a"}, {"prompt": "b", "meta": {"gold": "4"}})
    assert [prompt.answer for prompt in load(path, chatml, fields={"answer": "meta.gold"})] == [None, "4"]
