"""What a policy writes never fails in SGLang's parsers: every parser that SGLang has, with hostile texts."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import WorkerError
from megarl.rollout.gateway import reply_parser
from megarl.rollout.gateway.reply_parser import (
    ParsedReply,
    SglangParser,
    ToolCall,
    find_reasoning_parsers,
    find_tool_parsers,
)
from tests.errors import expect_error
from tests.hostile_texts import hostile_texts, sampled_hostile_texts
from tests.rollout.clock import in_event_loop
from tests.rollout.environments.chat_templates import APPEND, chat_tokenizer
from tests.rollout.gateway.scripted import SeededEngine, logged_ids, make_agent, make_prompt, run_groups, sampled_ids
from tests.rollout.gateway.test_sessions import TOOL, answers, chat, post_all
from tests.time_limits import UNREACHED_SECONDS

PARAMETERS = {"type": "object", "properties": {"key": {"type": "integer"}, "a": {"type": "string"}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}

RAISING = {
    "number": "<tool_call>\n5\n</tool_call>",
    "null": "<tool_call>\nnull\n</tool_call>",
    "list as a name": '<tool_call>\n{"name": ["look"], "arguments": {}}\n</tool_call>',
    "nested": "<tool_call>\n" + "[" * 3000 + "\n</tool_call>",
    "digits": '<tool_call>\n{"name": "look", "arguments": {"a": ' + "9" * 5000 + "}}\n</tool_call>",
}
"""Replies on which SGLang's parser qwen25 raises AttributeError, TypeError, RecursionError and ValueError."""


def test_the_run_continues_after_replies_on_which_the_parser_raises() -> None:
    tokenizer = chat_tokenizer("{% if tools %}<|tools|>\n{{ tools | tojson }}<eos>\n{% endif %}" + APPEND)
    replies = dict(enumerate(RAISING.values()))
    bodies = [chat(f"question {number}", tools=[TOOL]) for number in replies]
    engine = SeededEngine(tokenizer, reply=lambda prompt: replies[int(prompt.rpartition("question ")[2][0])])
    agent = make_agent(tokenizer, post_all, tool_parser="qwen25", kwargs={"path": "chat/completions", "bodies": bodies})
    prompt = make_prompt(tokenizer)
    ((summary, trajectories),) = run_groups(engine, agent, [prompt], max_new_tokens=100_000)
    messages = [answer.json()["choices"][0]["message"] for answer in answers]
    assert [message["content"] for message in messages] == list(replies.values())
    assert not any("tool_calls" in message for message in messages)
    assert summary.kept == (0,)
    assert summary.trajectories[0].num_turns == len(replies)
    assert sampled_ids(trajectories) == logged_ids(engine)


async def parse_all(parser: SglangParser, texts: Mapping[str, str]) -> None:
    """Parse texts, and assert that clients can read the replies: UTF-8, and calls of a known function."""
    for name, text in texts.items():
        found = await parser.parse(text, [LOOK])
        parts = [found.content, found.reasoning, *(call.arguments for call in found.calls)]
        assert [part.encode().decode() for part in parts] == parts, name
        assert any(parts) or not text, name
        for call in found.calls:
            assert call.name == "look", name
            assert isinstance(json.loads(call.arguments), dict), name


@pytest.fixture(scope="module")
def child() -> Iterator[SglangParser]:
    """A parser whose child process serves the others, since it takes long to start."""
    parser = SglangParser(tool_parser="qwen25", reasoning_parser="qwen3")
    asyncio.run(parse_all(parser, RAISING))
    assert parser.num_failed == len(RAISING)
    yield parser
    asyncio.run(parser.close())


NAMES: list[dict[str, str | None]] = [
    *({"tool_parser": name, "reasoning_parser": None} for name in find_tool_parsers() or ()),
    *({"tool_parser": None, "reasoning_parser": name} for name in find_reasoning_parsers() or ()),
]


def check_parser(names: Mapping[str, str | None], texts: Mapping[str, str], child: SglangParser) -> None:
    """Parse the texts in the process of `child`, or in others if a text kills it or keeps it busy for its timeout."""
    parser = SglangParser(**names)
    parser.child = child.child
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reply_parser, "TIMEOUT_SECONDS", 10.0)  # some parsers take minutes for 100,000 spaces
        asyncio.run(parse_all(parser, texts))
    if parser.child is not child.child:
        child.child = None
        asyncio.run(parser.close())
        asyncio.run(parse_all(child, {"start": "x"}))


@pytest.mark.parametrize("number", range(len(NAMES)), ids=lambda number: "-".join(filter(None, NAMES[number].values())))
def test_each_parser_of_sglang_returns_hostile_texts(number: int, child: SglangParser) -> None:
    check_parser(NAMES[number], {**RAISING, **sampled_hostile_texts(offset=number)}, child)


@pytest.mark.slow
def test_each_parser_of_sglang_returns_all_hostile_texts(child: SglangParser) -> None:
    for names in NAMES:
        check_parser(names, hostile_texts(), child)


def test_sglang_has_the_parsers_that_are_tested() -> None:
    assert sum(bool(names["tool_parser"]) for names in NAMES) > 40
    assert sum(bool(names["reasoning_parser"]) for names in NAMES) > 20


FRAIL_CHILD = """
import json, os, sys, time
with open("starts", "a") as file:
    file.write("x")
for line in sys.stdin:
    text = json.loads(line)["text"]
    if text == "hang":
        time.sleep(10**6)
    if text == "die":
        os.kill(os.getpid(), 11)
    if text == "half":
        print('{"content": ', end="", flush=True)
        os._exit(1)
    names = [["look", 5], [None, "{}"]] if text == "types" else [["look", "[1]"], ["other", "{}"], ["look", "{"]]
    calls = names if text in ("types", "invalid") else [["look", ""]] if text == "call" else []
    print(json.dumps({"content": "parsed " + text, "reasoning": "", "calls": calls}), flush=True)
"""


def use_child(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> SglangParser:
    (folder / "child.py").write_text(source)
    monkeypatch.setattr(reply_parser, "CHILD", folder / "child.py")
    monkeypatch.chdir(folder)
    return SglangParser(tool_parser="qwen25", reasoning_parser=None)


@in_event_loop
async def test_a_process_that_a_text_kills_or_keeps_busy_is_replaced(tmp_path: Path, monkeypatch: Any) -> None:
    parser = use_child(FRAIL_CHILD, tmp_path, monkeypatch)
    for number, text in enumerate(("die", "half", "hang"), 2):
        if text == "hang":
            monkeypatch.setattr(reply_parser, "TIMEOUT_SECONDS", 0.1)
        assert await parser.parse(text, [LOOK]) == ParsedReply(text)
        monkeypatch.setattr(reply_parser, "TIMEOUT_SECONDS", UNREACHED_SECONDS)
        assert (await parser.parse("x", [LOOK])).content == "parsed x"
        assert len(Path("starts").read_text()) == number
    assert parser.num_failed == 3
    await parser.close()


@in_event_loop
async def test_a_reply_without_a_valid_call_is_content_as_a_whole(tmp_path: Path, monkeypatch: Any) -> None:
    parser = use_child(FRAIL_CHILD, tmp_path, monkeypatch)
    for text in ("types", "invalid"):
        assert await parser.parse(text, [LOOK]) == ParsedReply(text)
    assert await parser.parse("call", [LOOK]) == ParsedReply("parsed call", "", (ToolCall("look", "{}"),))
    await parser.close()


@in_event_loop
async def test_a_process_that_does_not_start_ends_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    parser = use_child("raise SystemExit(3)", tmp_path, monkeypatch)
    with expect_error(WorkerError, "SGLang's", "process", "parsers"):
        await parser.parse("x", [LOOK])


@in_event_loop
async def test_an_unknown_parser_ends_the_run() -> None:
    parser = SglangParser(tool_parser="qwen99", reasoning_parser=None)
    with expect_error(WorkerError, "qwen99", "cannot"):
        await parser.parse("x", [LOOK])
