"""Shapes of demonstrations and preference pairs that people bring: tokens and masks of hand-made rows.

The expected tokens and masks of conversations are those of transformers, on a template with generation marks that the
loaded tokenizer does not have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.batch.trajectory import Trajectory
from megarl.config.data import DataConfig
from megarl.data.demonstrations import load_demonstrations
from megarl.data.preference_pairs import PreferencePair, load_preferences
from megarl.errors import DataError
from tests.data.chat_templates import CHATML, QWEN3, make_tokenizer, trained_texts, without_marks
from tests.data.conftest import Jsonl, Tokenizer
from tests.errors import expect_error

END = "<|im_end|>"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
JSON_CALLS = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]
TWO_TURNS = [user("Hi"), assistant("Yes"), user("2+2?"), assistant("4")]

SHAPES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    "OpenAI messages": ({"messages": TWO_TURNS}, TWO_TURNS, {}),
    "with a system message of the configuration": (
        {"messages": TWO_TURNS},
        [{"role": "system", "content": "Be brief"}, *TWO_TURNS],
        {"system_prompt": "Be brief"},
    ),
    "JSON text": ({"messages": json.dumps(TWO_TURNS)}, TWO_TURNS, {}),
    "named field": ({"chat": TWO_TURNS}, TWO_TURNS, {"fields": {"messages": "chat"}}),
    "messages in the field of the prompt": ({"chat": TWO_TURNS}, TWO_TURNS, {"fields": {"prompt": "chat"}}),
    "last message of the user": ({"messages": [*TWO_TURNS, user("more")]}, TWO_TURNS, {}),
    "parts of text": (
        {"messages": [user([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]), *TWO_TURNS[1:]]},  # type: ignore[arg-type]
        TWO_TURNS,
        {},
    ),
    "tools": (
        {
            "messages": [
                user("2+2?"),
                {"role": "assistant", "content": None, "tool_calls": JSON_CALLS},
                {"role": "tool", "content": "4"},
                assistant("4"),
            ],
            "tools": json.dumps([ADD]),
        },
        [user("2+2?"), assistant("", tool_calls=CALLS), {"role": "tool", "content": "4"}, assistant("4")],
        {},
    ),
    "ShareGPT": (
        {
            "conversations": [
                {"from": "system", "value": "Be brief"},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Yes"},
                {"from": "human", "value": "2+2?"},
                {"from": "gpt", "value": "4"},
            ]
        },
        [{"role": "system", "content": "Be brief"}, *TWO_TURNS],
        {},
    ),
    "ShareGPT with calls": (
        {
            "conversations": [
                {"from": "human", "value": "2+2?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "4"},
            ],
            "tools": json.dumps([ADD["function"]]),
            "system": "",
        },
        [user("2+2?"), assistant("", tool_calls=CALLS), {"role": "tool", "content": "4"}, assistant("4")],
        {},
    ),
    "Alpaca": ({"instruction": "Add", "input": "2+2", "output": "4"}, [user("Add\n2+2"), assistant("4")], {}),
    "Alpaca without input": ({"instruction": "Hi", "input": "", "output": "Yes"}, [user("Hi"), assistant("Yes")], {}),
    "Alpaca with system and history": (
        {"instruction": "2+2?", "output": "4", "system": "Be brief", "history": [["Hi", "Yes"]]},
        [{"role": "system", "content": "Be brief"}, *TWO_TURNS],
        {},
    ),
    "TRL prompt and completion": ({"prompt": TWO_TURNS[:1], "completion": TWO_TURNS[1:]}, TWO_TURNS, {}),
    "TRL texts": ({"prompt": "Hi", "completion": "Yes"}, TWO_TURNS[:2], {}),
    "prompt and response": ({"prompt": "Hi", "response": "Yes"}, TWO_TURNS[:2], {}),
}


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    return make_tokenizer(CHATML)


@pytest.fixture(scope="module")
def chatml() -> Tokenizer:
    return make_tokenizer(without_marks(CHATML))


def expected_tokens(
    marked: Tokenizer, messages: list[dict[str, Any]], tools: Any = None
) -> tuple[list[int], list[int]]:
    """Return ids and mask of a conversation, up to the token that ends its last turn."""
    of = marked.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    mask: list[int] = of["assistant_masks"]
    size = len(mask) - mask[::-1].index(1)
    return of["input_ids"][:size], mask[:size]


def check(sample: Trajectory, expected: tuple[list[int], list[int]]) -> None:
    assert (sample.token_ids.tolist(), sample.loss_mask.astype(int).tolist()) == expected
    assert (sample.token_ids.dtype, sample.loss_mask.dtype) == (np.int32, np.bool_)


@pytest.mark.parametrize("name", SHAPES)
def test_demonstrations_of_every_shape(name: str, jsonl: Jsonl, marked: Tokenizer, chatml: Tokenizer) -> None:
    row, messages, keys = SHAPES[name]
    config = DataConfig(path=str(jsonl(row, row)), **keys)
    samples = load_demonstrations(config, chatml, max_tokens=512)
    assert [(sample.prompt_id, sample.group_id) for sample in samples] == [("rows.jsonl:1", 0), ("rows.jsonl:2", 1)]
    for sample in samples:
        check(sample, expected_tokens(marked, messages, [ADD] if "tools" in row else None))


def test_tools_are_part_of_the_prompt_of_a_text(jsonl: Jsonl, chatml: Tokenizer) -> None:
    rows = [
        {"prompt": "2+2?", "response": "4", "tools": [ADD]},
        {"messages": [user("2+2?"), assistant("4")], "tools": [ADD]},
    ]
    text, messages = load_demonstrations(DataConfig(path=str(jsonl(*rows))), chatml, max_tokens=512)
    assert text.token_ids.tolist() == messages.token_ids.tolist()
    assert '"add"' in chatml.decode(text.token_ids)


def test_nulls_of_parquet_are_missing_keys(tmp_path: Path, marked: Tokenizer, chatml: Tokenizer) -> None:
    """Parquet gives each call the arguments of all calls of the file."""
    other = [{"type": "function", "function": {"name": "sub", "arguments": {"b": 3}}}]
    of_rows = [
        [user("2+2?"), assistant("", tool_calls=calls), {"role": "tool", "content": "4"}, assistant("4")]
        for calls in (CALLS, other)
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "tools": None} for messages in of_rows]), path)
    samples = load_demonstrations(DataConfig(path=str(path)), chatml, max_tokens=512)
    for sample, messages in zip(samples, of_rows, strict=True):
        check(sample, expected_tokens(marked, messages))


@pytest.mark.parametrize(
    "off", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"step_loss_mask": 0}, {"weight": 0, "train": False}]
)
def test_messages_with_weight_0_are_not_trained_on(off: dict[str, Any], jsonl: Jsonl, chatml: Tokenizer) -> None:
    first, second = assistant("Yes"), assistant("4", weight=1)
    on, without = ([user("Hi"), first | keys, user("2+2?"), second] for keys in ({"weight": None}, off))
    both, one = load_demonstrations(
        DataConfig(path=str(jsonl({"messages": on}, {"messages": without}))), chatml, max_tokens=512
    )
    assert both.token_ids.tolist() == one.token_ids.tolist()
    assert (trained_texts(chatml, both), trained_texts(chatml, one)) == (["Yes" + END, "4" + END], ["4" + END])


def test_turns_of_the_prompt_are_not_trained_on(jsonl: Jsonl, chatml: Tokenizer) -> None:
    row = {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}
    (sample,) = load_demonstrations(DataConfig(path=str(jsonl(row))), chatml, max_tokens=512)
    assert trained_texts(chatml, sample) == ["4" + END]


def test_samples_of_rewritten_conversations_are_numbered_and_reported(
    jsonl: Jsonl, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer(without_marks(QWEN3))
    path = str(jsonl({"messages": TWO_TURNS}, {"messages": TWO_TURNS[:2]}))
    samples = load_demonstrations(DataConfig(path=path), tokenizer, max_tokens=512)
    assert [sample.prompt_id for sample in samples] == ["rows.jsonl:1", "rows.jsonl:1", "rows.jsonl:2"]
    assert [sample.group_id for sample in samples] == [0, 1, 2]
    assert [trained_texts(tokenizer, sample) for sample in samples] == [
        ["<think>\n\n</think>\n\nYes" + END],
        ["<think>\n\n</think>\n\n4" + END],
        ["<think>\n\n</think>\n\nYes" + END],
    ]
    assert "3 samples of 2 rows" in caplog.text
    # the longest sample of a row decides
    limit = samples[0].num_tokens
    (kept,) = load_demonstrations(DataConfig(path=path, overlong_prompts="drop"), tokenizer, max_tokens=limit)
    assert kept.prompt_id == "rows.jsonl:2"
    assert "dropped 1 of 2 rows" in caplog.text


def test_alpaca_without_a_chat_template(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    path = str(jsonl({"instruction": "Add", "input": "2+2", "output": "4"}))
    config = DataConfig(path=path, prompt_template="Q: {prompt}\nA: ")
    (sample,) = load_demonstrations(config, tokenizer, max_tokens=64)
    assert tokenizer.decode(sample.token_ids) == "Q: Add\n2+2\nA: 4<eos>"
    assert trained_texts(tokenizer, sample) == ["4<eos>"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [user("Hi")]}, ["no turn", "assistant"]),
        ({"messages": [user("Hi"), assistant("Yes", weight=0)]}, ["no turn"]),
        ({"messages": [user("Hi"), assistant("Yes", weight=0.5)]}, ["message 2", "0.5"]),
        ({"messages": [user("Hi"), assistant("Yes", step_loss_mask=2)]}, ["message 2", "2"]),
        (
            {"messages": [user("Hi"), assistant("Yes", weight=1, train=False)]},
            ["weight: 1", "train: False", "message 2"],
        ),
        ({"messages": [user("Hi") | {"train": True}, assistant("Yes")]}, ["message 1", "train"]),
        ({"messages": []}, ["'messages'", "empty list"]),
        ({"messages": "Hi"}, ["'messages'", "str"]),
        ({"messages": [user("Hi"), {"role": "assistant"}]}, ["message 2", "no text"]),
        ({"messages": [user("Hi"), {"role": "assistant", "content": None}]}, ["message 2", "no text"]),
        ({"messages": [{"role": "user"}, assistant("Yes")]}, ["message 1", "text"]),
        ({"messages": [user("Hi"), {"content": "Yes"}]}, ["message 2", "role"]),
        ({"messages": [user("Hi"), "Yes"]}, ["message 2"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, assistant("Yes")]}, ["message 1", "text"]),
        ({"conversations": [{"from": "function_call", "value": "add(2)"}]}, ["message 1", "JSON"]),
        ({"messages": TWO_TURNS, "tools": "no JSON"}, ["tools"]),
        ({"messages": TWO_TURNS, "tools": ["add"]}, ["'tools'", "add"]),
        ({"instruction": "a", "output": "b", "history": ["Hi"]}, ["history"]),
        ({"instruction": "a", "output": ""}, ["'output'", "empty"]),
        ({"text": "a"}, ["'response'", "'messages'", "'text'"]),
    ],
)
def test_bad_demonstrations_are_reported(row: object, words: list[str], jsonl: Jsonl, chatml: Tokenizer) -> None:
    path = str(jsonl({"messages": TWO_TURNS}, row))
    with expect_error(DataError, "rows.jsonl:2", *words):
        load_demonstrations(DataConfig(path=path), chatml, max_tokens=512)


def test_conversations_need_a_chat_template(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    for row in ({"messages": TWO_TURNS}, {"instruction": "a", "output": "b", "system": "c"}):
        with expect_error(DataError, "rows.jsonl:1", "chat template"):
            load_demonstrations(DataConfig(path=str(jsonl(row))), tokenizer, max_tokens=512)


GOOD, BAD = [*TWO_TURNS[:3], assistant("4")], [*TWO_TURNS[:3], assistant("22")]
HH_HEAD = "\n\nHuman: Hi\n\nAssistant: Yes\n\nHuman: 2+2?\n\nAssistant:"

PAIRS: dict[str, dict[str, Any]] = {
    "UltraFeedback": {"prompt": "2+2?", "chosen": GOOD, "rejected": BAD, "score_chosen": 8.0},
    "TRL implicit prompt": {"chosen": GOOD, "rejected": BAD},
    "TRL explicit prompt": {"prompt": GOOD[:3], "chosen": GOOD[3:], "rejected": BAD[3:]},
    "one message": {"prompt": GOOD[:3], "chosen": GOOD[3], "rejected": BAD[3]},
    "HH-RLHF": {"chosen": HH_HEAD + " 4", "rejected": HH_HEAD + " 22"},
    "HelpSteer3, first is better": {
        "context": GOOD[:3],
        "response1": "4",
        "response2": "22",
        "overall_preference": -2,
    },
    "HelpSteer3, second is better": {
        "context": GOOD[:3],
        "response1": "22",
        "response2": "4",
        "overall_preference": 1,
    },
    "NeMo-RL, first is better": {
        "context": GOOD[:3],
        "completions": [{"rank": 0, "completion": GOOD[3:]}, {"rank": 1, "completion": BAD[3:]}],
    },
    "NeMo-RL, second is better": {
        "context": GOOD[:3],
        "completions": [{"rank": 2, "completion": BAD[3:]}, {"rank": 1, "completion": GOOD[3:]}],
    },
    "texts after messages": {"prompt": GOOD[:3], "chosen": "4", "rejected": "22"},
}


def load_pairs(path: Path, tokenizer: Tokenizer) -> list[PreferencePair]:
    return load_preferences(DataConfig(path=str(path)), tokenizer, max_tokens=512)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_every_shape(name: str, jsonl: Jsonl, marked: Tokenizer, chatml: Tokenizer) -> None:
    for i, pair in enumerate(load_pairs(jsonl(PAIRS[name], PAIRS[name]), chatml)):
        for sample, messages in ((pair.chosen, GOOD), (pair.rejected, BAD)):
            ids, mask = expected_tokens(marked, messages)
            end = len(mask) - mask[::-1].index(0)  # only the last turn counts
            check(sample, (ids, [0] * end + mask[end:]))
            assert (sample.prompt_id, sample.group_id) == (f"rows.jsonl:{i + 1}", i)


def test_ties_are_dropped_and_counted(jsonl: Jsonl, chatml: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    row = PAIRS["HelpSteer3, first is better"]
    (pair,) = load_pairs(jsonl(row | {"overall_preference": 0}, row), chatml)
    assert (pair.chosen.prompt_id, pair.chosen.group_id) == ("rows.jsonl:2", 0)
    assert "dropped 1 row" in caplog.text
    with expect_error(DataError, "rows.jsonl", "2", "equal"):
        load_pairs(jsonl(*[row | {"overall_preference": 0}] * 2), chatml)


def test_equal_ranks_are_dropped(jsonl: Jsonl, chatml: Tokenizer) -> None:
    row = PAIRS["NeMo-RL, first is better"]
    tie = {**row, "completions": [{**each, "rank": 1} for each in row["completions"]]}
    (pair,) = load_pairs(jsonl(tie, row), chatml)
    assert pair.chosen.prompt_id == "rows.jsonl:2"


def test_hh_without_a_chat_template(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    (pair,) = load_pairs(jsonl(PAIRS["HH-RLHF"]), tokenizer)
    assert tokenizer.decode(pair.chosen.token_ids) == HH_HEAD.strip() + " 4<eos>"
    assert trained_texts(tokenizer, pair.rejected) == [" 22<eos>"]


def test_empty_answers_of_hh_are_refused(jsonl: Jsonl, tokenizer: Tokenizer, chatml: Tokenizer) -> None:
    for each in (tokenizer, chatml):
        with expect_error(DataError, "rows.jsonl:1", "text"):
            load_pairs(jsonl({"chosen": HH_HEAD + " 4", "rejected": HH_HEAD}), each)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": GOOD, "rejected": GOOD}, ["same answer"]),
        ({"chosen": GOOD, "rejected": GOOD[:2]}, ["differ", "4", "2"]),
        ({"chosen": [*GOOD, user("a"), assistant("b")], "rejected": [*BAD, user("a"), assistant("b")]}, ["first 3"]),
        ({"chosen": [user("a")], "rejected": [user("b")]}, ["prompt"]),
        ({"chosen": [user("a"), user("b")], "rejected": [user("a"), assistant("c")]}, ["assistant", "user"]),
        ({"chosen": GOOD, "rejected": "4"}, ["'chosen'", "string", "list"]),
        ({"chosen": HH_HEAD + " a", "rejected": "\n\nHuman: Ho\n\nAssistant: b"}, ["differ"]),
        ({"chosen": "a", "rejected": "b"}, ["'prompt'", "missing"]),
        ({**PAIRS["HelpSteer3, first is better"], "overall_preference": 7}, ["overall_preference", "7"]),
        ({**PAIRS["HelpSteer3, first is better"], "overall_preference": None}, ["overall_preference", "None"]),
        ({**PAIRS["HelpSteer3, first is better"], "response2": "4"}, ["same answer"]),
        ({"context": "a", "completions": [{"rank": 0, "completion": GOOD[3:]}]}, ["'completions'", "1 entries"]),
        ({"context": "a", "completions": [{"rank": "0"}, {"rank": 1}]}, ["'completions'", "ranks are numbers", "'0'"]),
        ({"context": "a", "completions": "b"}, ["'completions'", "str"]),
        (
            {"context": "a", "completions": [{"rank": 0, "completion": GOOD[3:]}, {"rank": 1}]},
            ["'completions'", "data.fields.rejected", "NoneType"],
        ),
    ],
)
def test_bad_pairs_are_reported(row: object, words: list[str], jsonl: Jsonl, chatml: Tokenizer) -> None:
    with expect_error(DataError, "rows.jsonl:2", *words):
        load_pairs(jsonl(PAIRS["UltraFeedback"], row), chatml)
