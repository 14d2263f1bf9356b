"""Harnesses of the tests: conversations by several clients and APIs, without a word about tokens.

Clients do not load certificates, which takes longer than a conversation, and wait as long as it takes.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from megarl.rollout.environments.environment import Task

Messages = Sequence[Mapping[str, Any]]


async def talk(task: Task, base_url: str, api_key: str, *, kinds: Sequence[str] = ("raw",)) -> None:
    """Ask `row.turns` questions, by the kind of client that the number of the row chooses."""
    row = task.prompt.row
    number = int(task.prompt.prompt_id.rpartition(":")[2])
    ask = KINDS[kinds[number % len(kinds)]]
    messages = list(task.messages)
    for turn in range(row["turns"]):
        reply = await ask(base_url, api_key, messages)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"why {turn}?"}]


async def ask_raw(base_url: str, api_key: str, messages: Messages, **options: Any) -> str:
    """Post to the path of the session, without an API key."""
    body = {"model": "m", "messages": messages, **options}
    async with httpx.AsyncClient(verify=False, timeout=None) as client:
        response = await client.post(f"{base_url}/chat/completions", json=body)
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


async def ask_raw_stream(base_url: str, api_key: str, messages: Messages) -> str:
    """Read the events of a stream, by API key alone."""
    root, headers = base_url.partition("/s/")[0], {"Authorization": f"Bearer {api_key}"}
    body, text = {"model": "m", "messages": messages, "stream": True}, ""
    async with (
        httpx.AsyncClient(headers=headers, verify=False, timeout=None) as client,
        client.stream("POST", f"{root}/v1/chat/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
    return text


async def ask_sync(base_url: str, api_key: str, messages: Messages) -> str:
    def ask() -> str:
        plain = httpx.Client(verify=False)
        with OpenAI(base_url=base_url, api_key=api_key, timeout=None, http_client=plain) as client:
            found = client.chat.completions.create(model="m", messages=list(messages))  # type: ignore[arg-type]
        return found.choices[0].message.content or ""

    return await asyncio.to_thread(ask)


def make_client(base_url: str, api_key: str) -> AsyncOpenAI:
    plain = httpx.AsyncClient(verify=False)
    return AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, http_client=plain)


async def ask_async(base_url: str, api_key: str, messages: Messages) -> str:
    async with make_client(base_url, api_key) as client:
        found = await client.chat.completions.create(model="m", messages=list(messages))  # type: ignore[arg-type]
    return found.choices[0].message.content or ""


async def ask_stream(base_url: str, api_key: str, messages: Messages) -> str:
    text = ""
    async with make_client(base_url, api_key) as client:
        stream: Any = await client.chat.completions.create(model="m", messages=list(messages), stream=True)  # type: ignore[call-overload]
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    return text


async def ask_responses(base_url: str, api_key: str, messages: Messages) -> str:
    async with make_client(base_url, api_key) as client:
        found = await client.responses.create(model="m", input=list(messages))  # type: ignore[arg-type]
    return found.output_text


async def ask_responses_stream(base_url: str, api_key: str, messages: Messages) -> str:
    """Return the text of the deltas, which is that of the last event."""
    text, last = "", ""
    async with make_client(base_url, api_key) as client:
        stream: Any = await client.responses.create(model="m", input=list(messages), stream=True)  # type: ignore[call-overload]
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type in ("response.completed", "response.incomplete"):
                last = event.response.output_text
    assert text == last
    return text


async def ask_messages(base_url: str, api_key: str, messages: Messages) -> str:
    """Post to Anthropic's API as its SDK does, which gets the base URL without `/v1`."""
    url = f"{base_url.removesuffix('/v1')}/v1/messages"
    body = {"model": "m", "max_tokens": 4096, "messages": messages}
    async with httpx.AsyncClient(verify=False, timeout=None) as client:
        response = await client.post(url, json=body, headers={"x-api-key": api_key})
    return "".join(block["text"] for block in response.raise_for_status().json()["content"])


async def ask_messages_stream(base_url: str, api_key: str, messages: Messages) -> str:
    """Read the events of Anthropic's API, by API key alone."""
    url, text = f"{base_url.partition('/s/')[0]}/v1/messages", ""
    body = {"model": "m", "max_tokens": 4096, "messages": messages, "stream": True}
    async with (
        httpx.AsyncClient(headers={"x-api-key": api_key}, verify=False, timeout=None) as client,
        client.stream("POST", url, json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                text += json.loads(line.removeprefix("data: ")).get("delta", {}).get("text", "")
    return text


KINDS = {
    "raw": ask_raw,
    "raw stream": ask_raw_stream,
    "sync": ask_sync,
    "async": ask_async,
    "stream": ask_stream,
    "responses": ask_responses,
    "responses stream": ask_responses_stream,
    "messages": ask_messages,
    "messages stream": ask_messages_stream,
}
