"""The example examples/gateway: its data, its chat template, and the process that its episodes share."""

from __future__ import annotations

import asyncio
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.data.tiny_checkpoint import CHAT_TEMPLATE
from megarl.rollout.gateway.reply_parser import ParsedReply, SglangParser
from tests.rollout.environments.chat_templates import chat_tokenizer
from tests.time_limits import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gateway"

compute = runpy.run_path(str(EXAMPLE / "calculate.py"))["compute"]

DEFINITION: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an expression, such as 12*34-5.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}

SOLVE = """
import asyncio, os, sys
sys.path.insert(0, {folder!r})
from serve import serve

async def solve(task, base_url, api_key):
    print("printed by a framework")
    text = task["messages"][0]["content"]
    if text == "wait":
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            open(base_url, "w").close()
            raise
    if text == "raise":
        raise ValueError("no such tool")
    if text == "exit":
        os._exit(3)

serve(solve)
"""


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "pool", raising=False)
    import pool

    yield pool
    sys.modules.pop("pool")


async def parse(text: str) -> ParsedReply:
    """Return what SGLang's parser finds in a reply."""
    parser = SglangParser(tool_parser="qwen25", reasoning_parser=None)
    try:
        return await parser.parse(text, [DEFINITION])
    finally:
        await parser.close()


def make_task(text: str) -> Any:
    return SimpleNamespace(messages=[{"role": "user", "content": text}], seed=1)


def test_demonstrations_are_rendered_as_conversations_with_tools(tmp_path: Path) -> None:
    script = ROOT / "examples" / "environments" / "make_data.py"
    subprocess.run([sys.executable, str(script), "tool-calls", str(tmp_path)], check=True)
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    row = next(row for row in rows if len(row["prompt"]) > 2)
    _, question, call, result = row["prompt"]
    (found,) = asyncio.run(parse(call["content"])).calls
    arguments = json.loads(found.arguments)
    assert found.name == "calculate"
    assert compute(arguments["expression"]) == result["content"]
    tokenizer = chat_tokenizer(CHAT_TEMPLATE)
    function = {"name": found.name, "arguments": arguments}
    asked = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    options = {"tokenize": False, "add_generation_prompt": True}
    with_tools = tokenizer.apply_chat_template([question, asked, result], tools=[DEFINITION], **options)
    assert tokenizer.apply_chat_template(row["prompt"], **options) == with_tools


@pytest.mark.parametrize("expression", ["1+1", "2*3", "9" * 10 + "*1-1", "__import__('os')"])
def test_the_tool_evaluates_no_code(expression: str) -> None:
    assert compute(expression) == "error: write a*b-c"


def test_episodes_share_a_process_and_fail_alone(pool: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SOLVE.format(folder=str(EXAMPLE))]

    async def main() -> None:
        run = pool.run
        waiting = asyncio.create_task(run(make_task("wait"), str(tmp_path / "cancelled"), "key", command=command))
        results = await asyncio.gather(
            *(run(make_task(text), "", "key", command=command) for text in ["a", "raise", "b"]), return_exceptions=True
        )
        assert [results[0], results[2]] == [None, None]
        assert str(results[1]) == "ValueError: no such tool"
        (program,) = pool._programs.values()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await asyncio.to_thread(wait_until, (tmp_path / "cancelled").exists)
        with pytest.raises(RuntimeError, match="exit code 3"):
            await run(make_task("exit"), "", "key", command=command)
        await run(make_task("a"), "", "key", command=command)
        (other,) = pool._programs.values()
        assert other is not program
        other._process.stdin.close()
        assert await other._process.wait() == 0

    asyncio.run(main())
