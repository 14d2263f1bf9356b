"""Sessions of thousands of turns: a turn costs what is new in it, and not the turns before."""

import asyncio
import http.client
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from megarl.config.rollout import HarnessConfig
from megarl.engines.engine import Generation, GenerationRequest, Sampling
from megarl.rollout.agents.episode import Episode
from megarl.rollout.environments.conversation import ChatRenderer
from megarl.rollout.environments.environment import Message
from megarl.rollout.gateway import session, turn_request, turns
from megarl.rollout.gateway.chat_api import chat_response, read_chat_request
from megarl.rollout.gateway.reply_parser import ParsedReply, PlainTextParser, ReplyParser, ToolCall
from megarl.rollout.gateway.server import GatewayServer
from megarl.rollout.gateway.session import Session
from megarl.rollout.gateway.turns import JsonMemory
from tests.rollout.environments.chat_templates import APPEND, DAY, chat_tokenizer
from tests.rollout.gateway.scripted import make_prompt
from tests.rollout.whole_batches import WholeBatches, make_generation
from tests.time_limits import HANG_SECONDS

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class QuickEngine(WholeBatches):
    """Samples the same tokens each time, without looking at the prompt."""

    token_ids: list[int]
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    """The last prompt."""

    async def generate(self, request: GenerationRequest) -> Generation:
        self.prompts[:] = [request.token_ids]
        return make_generation(self.token_ids)


class Caller:
    """Takes each reply as a call of a tool."""

    async def parse(self, text: str, tools: Sequence[Message]) -> ParsedReply:
        return ParsedReply("", "", (ToolCall("look", "{}"),))

    async def close(self) -> None:
        pass


class CountingRenderer(ChatRenderer):
    """Counts the characters that the chat template writes and the tokenizer reads."""

    num_rendered = num_encoded = 0

    def render(self, *args: Any, **kwargs: Any) -> str:
        text = super().render(*args, **kwargs)
        self.num_rendered += len(text)
        return text

    def encode(self, text: str) -> list[int]:
        self.num_encoded += len(text)
        return super().encode(text)


def _reply(tokenizer: Any) -> list[int]:
    return [*tokenizer.encode("yes", add_special_tokens=False), tokenizer.eos_token_id]


def make_session(tokenizer: Any, engine: QuickEngine, renderer: ChatRenderer, parser: ReplyParser) -> Session:
    sampling = Sampling(temperature=1.0, max_new_tokens=10**7, seed=1)
    episode = Episode(make_prompt(tokenizer), tokenizer, engine, sampling, request_id="r", group_id=0)
    config = HarnessConfig(path="a:b", max_seconds=1e9, max_turns=10**6)
    return Session(episode, config, renderer, parser, can_call=True)


async def run_turns(renderer: ChatRenderer, tokenizer: Any, num_turns: int, *, calls: bool) -> Any:
    """Yield the number of each turn after it, of a client that sends the whole conversation with each request."""
    engine = QuickEngine(_reply(tokenizer))
    ours = make_session(tokenizer, engine, renderer, Caller() if calls else PlainTextParser())
    messages: list[dict[str, Any]] = [{"role": "user", "content": "is it?"}]
    for turn in range(num_turns):
        sent = [{**message} for message in messages]  # a client's messages are others in each request
        request = read_chat_request({"messages": sent, "tools": [TOOL] if calls else []}, ours.read_before["chat"])
        answered = await ours.answer(request)
        message = chat_response(answered, request, tokenizer=None)["choices"][0]["message"]
        key = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"]} if calls else {"role": "user"}
        messages += [message, {**key, "content": f"why {turn:05d}?"}]
        yield turn
    (trajectory,) = ours.trajectories(None)
    tokens = trajectory.token_ids[: len(engine.prompts[0])]
    assert tuple(tokens.tolist()) == engine.prompts[0]
    expected = tokenizer.decode(renderer.prompt(messages[:-2], [TOOL] if calls else []))
    if not calls:
        assert tokenizer.decode(tokens) == expected


@pytest.mark.parametrize("calls", [False, True])
def test_what_is_read_hashed_rendered_and_encoded_does_not_grow(calls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer(APPEND)
    renderer = CountingRenderer(tokenizer, DAY)
    hashed: list[Message] = []
    digest = turn_request.message_digest
    monkeypatch.setattr(session, "message_digest", lambda message: hashed.append(message) or digest(message))

    async def count() -> list[tuple[int, int, int]]:
        found = []
        async for _ in run_turns(renderer, tokenizer, 600, calls=calls):
            found.append((renderer.num_rendered, renderer.num_encoded, len(hashed)))
        return found

    totals = np.diff(np.array(asyncio.run(count())), axis=0)
    early, late = totals[20:40], totals[-20:]
    assert (late.max(0) <= early.max(0)).all(), (early.max(0), late.max(0))
    assert late[:, 2].max() == 3  # the reply as the gateway and as the client has it, and the new message


NUMBERS_ROUNDS = (
    "{% for m in messages %}{% if m.role == 'user' %}[Round {{ loop.index0 // 2 }}]{% endif %}"
    "<|{{ m.role }}|>\n{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_a_template_that_numbers_messages_gets_the_whole_conversation() -> None:
    tokenizer = chat_tokenizer(NUMBERS_ROUNDS)

    async def run() -> list[int]:
        return [turn async for turn in run_turns(ChatRenderer(tokenizer, DAY), tokenizer, 40, calls=False)]

    assert len(asyncio.run(run())) == 40  # the tokens are those of the whole conversation


class CallCounter:
    """Counts the calls of functions, Python's and C's, that the thread makes in the block."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __enter__(self) -> "CallCounter":
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: object, event: str, argument: object) -> None:
        self.num_calls += event in ("call", "c_call")


@dataclass
class CountingEngine(QuickEngine):
    """Notes with each request how many functions its thread, which is that of the gateway, has called."""

    counter: CallCounter = field(default_factory=CallCounter)
    num_calls: list[int] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.num_calls.append(self.counter.num_calls)
        return await super().generate(request)


def talk(base_url: str, num_turns: int) -> None:
    """Send the whole conversation with each of the requests."""
    url = urlsplit(base_url)
    client = http.client.HTTPConnection(str(url.hostname), url.port, timeout=HANG_SECONDS)
    messages = [{"role": "user", "content": "is it?"}]
    for turn in range(num_turns):
        client.request("POST", f"{url.path}/chat/completions", json.dumps({"model": "m", "messages": messages}))
        reply = json.load(client.getresponse())["choices"][0]["message"]
        messages += [reply, {"role": "user", "content": f"why {turn:05d}?"}]
    client.close()


def test_the_gateway_does_as_much_for_turn_2000_as_for_turn_200(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    parse = turns.from_json
    monkeypatch.setattr(turns, "from_json", lambda text, **options: parsed.append(len(text)) or parse(text, **options))
    tokenizer = chat_tokenizer(APPEND)
    engine = CountingEngine(_reply(tokenizer))

    async def main() -> int:
        server = GatewayServer(tokenizer)
        await server.start()
        ours = make_session(tokenizer, engine, ChatRenderer(tokenizer, DAY), PlainTextParser())
        with server.serve(ours) as (base_url, _), engine.counter:
            await asyncio.to_thread(talk, base_url, 2000)
        await server.close()
        return len(ours.trajectories(None))

    assert asyncio.run(main()) == 1
    num_calls = np.diff(engine.num_calls)
    early, late = np.median(num_calls[150:250]), np.median(num_calls[-100:])
    assert late < 1.5 * early  # reading the body takes a few more calls; all else is the same
    assert max(parsed[-100:]) <= max(parsed[150:250])


def test_bodies_are_parsed_as_json_is_whatever_was_parsed_before() -> None:
    rng = random.Random(1)
    memory = JsonMemory("messages")
    messages: list[Any] = []
    num_known = 0
    for number in range(400):
        contents = ['a "messages": [1] ]', "é\n\\", "]},", {"messages": [1, {"b": []}]}, 1.5, None, [], "x" * 50]
        if rng.random() < 0.1:
            messages = messages[: rng.randrange(len(messages) + 1)]
        elif rng.random() < 0.5:
            messages = [
                *messages,
                *({"role": "user", "content": rng.choice(contents)} for _ in range(rng.randrange(3))),
            ]
        before = {"model": "m", "text": contents[0]} if rng.random() < 0.9 else {"other": contents[3]}
        body = {**before, "messages": messages, **({"tools": [[1], "]"]} if rng.random() < 0.9 else {})}
        separators, indent = rng.choice([((",", ":"), None), ((", ", ": "), None), ((" ,", " : "), 1)])
        text = json.dumps(body, separators=separators, indent=indent, ensure_ascii=number % 2 == 0)
        if rng.random() < 0.05:
            text = text[:-1] + ', "messages": [7]}'
        if rng.random() < 0.05:
            with pytest.raises(ValueError, match="line"):
                memory.parse(text[: rng.randrange(len(text))])
        elements = memory.elements
        assert memory.parse(text) == json.loads(text)
        num_known += bool(elements) and bool(memory.elements) and memory.elements[0] is elements[0]
    assert num_known > 50
