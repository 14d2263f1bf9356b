"""The data and tools of examples/environments and examples/gateway, as the recipes name them."""

import asyncio
import inspect
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megarl.batch.trajectory import Prompt
from megarl.config.section import load_object
from megarl.data.tiny_checkpoint import CHAT_TEMPLATE
from megarl.rollout.environments.environment import Task
from megarl.rollout.gateway.reply_parser import ParsedReply, SglangParser
from tests.errors import expect_error
from tests.rollout.environments.chat_templates import chat_tokenizer
from tests.time_limits import wait_until

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "environments"
NUM_PLAYED = 20


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_environment(name: str, folder: Path, **kwargs: Any) -> Any:
    """Return an environment of the recipe, with the data of `folder`."""
    text = (ROOT / "yaml" / "agents" / f"{name}.yaml").read_text().replace(f"runs/{name}/data", str(folder))
    config = yaml.safe_load(text)["rollout"]["env"]
    environment: Any = load_object(config["path"], key="rollout.env.path", kind="class")
    return environment(**config.get("kwargs", {}) | kwargs)


async def result_of(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@contextmanager
def serve_facts(folder: Path) -> Iterator[str]:
    """Yield the address of an API with the facts of `folder`."""
    command = [sys.executable, str(SCRIPTS / "api.py"), str(folder / "facts.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as api:
        assert api.stdout is not None
        try:
            yield api.stdout.readline().strip()
        finally:
            api.terminate()


@pytest.mark.parametrize("name", ["calculator", "http", "python", "search"])
def test_demonstrated_calls_have_the_results_of_the_environment(name, tmp_path):
    subprocess.run([sys.executable, str(SCRIPTS / "make_data.py"), name, str(tmp_path)], check=True)
    train, held_out = read(tmp_path / "train.jsonl"), read(tmp_path / "heldout.jsonl")
    assert len(train) >= 3900
    assert len(held_out) >= 150
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    demonstrations = read(tmp_path / "sft.jsonl")
    first = [row["response"] for row in demonstrations if len(row["prompt"]) == 1]
    assert 0.2 < sum("####" not in response for response in first) / len(first) < 0.3
    answers = {row["prompt"]: row["answer"] for row in train}
    played = [row for row in demonstrations if len(row["prompt"]) > 1][:NUM_PLAYED]
    assert len(played) == NUM_PLAYED
    with serve_facts(tmp_path) if name == "http" else nullcontext() as url:
        kwargs = {} if url is None else {"allow": [url], "base_url": url}
        asyncio.run(play(partial(make_environment, name, tmp_path, **kwargs), played, answers))


async def play(make: Callable[[], Any], played: Sequence[dict[str, Any]], answers: Mapping[str, str]) -> None:
    shared: dict[str, Any] = {}
    for row in played:
        question, call, result = row["prompt"]
        env = make()
        prompt = Prompt(prompt_id="p:1", text="", token_ids=(), row={}, answer=answers[question["content"]])
        try:
            await result_of(env.reset(Task(prompt=prompt, messages=[question], seed=1, shared=shared)))
            step = await result_of(env.step(call["content"]))
            assert list(step.messages) == [result]
            assert (await result_of(env.step(row["response"]))).reward == 1.0
        finally:
            await result_of(env.close())


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


def test_demonstrations_are_rendered_as_conversations_with_tools(tmp_path):
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
def test_the_tool_evaluates_no_code(expression):
    assert compute(expression) == "error: write a*b-c"


def test_episodes_share_a_process_and_fail_alone(pool, tmp_path):
    command = [sys.executable, "-c", SOLVE.format(folder=str(EXAMPLE))]

    async def main():
        run = pool.run
        waiting = asyncio.create_task(run(make_task("wait"), str(tmp_path / "cancelled"), "key", command=command))
        results = await asyncio.gather(
            *(run(make_task(text), "", "key", command=command) for text in ["a", "raise", "b"]), return_exceptions=True
        )
        assert [results[0], results[2]] == [None, None]
        assert str(results[1]) == "ValueError: no such tool"
        (program,) = pool.programs.values()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await asyncio.to_thread(wait_until, (tmp_path / "cancelled").exists)
        with expect_error(RuntimeError, "3"):
            await run(make_task("exit"), "", "key", command=command)
        await run(make_task("a"), "", "key", command=command)
        (other,) = pool.programs.values()
        assert other is not program
        other.process.stdin.close()
        assert await other.process.wait() == 0

    asyncio.run(main())
