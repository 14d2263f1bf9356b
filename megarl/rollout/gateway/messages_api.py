"""The API `/v1/messages` of Anthropic: its requests as `TurnRequest`, and turns as its responses and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.rollout.environments.environment import Message
from megarl.rollout.gateway.chat_api import count_tokens, split_text
from megarl.rollout.gateway.turn_request import (
    Applied,
    RefusedRequestError,
    TurnRequest,
    always,
    find_overruled,
    is_one_of,
    make_function,
    make_message,
    parse_arguments,
    read_flag,
    read_limit,
    read_list,
    read_object,
    read_stop,
    read_string,
    read_template_kwargs,
    read_text,
    require_list,
    shown,
)
from megarl.rollout.gateway.turns import PrefixMemory, Turn, call_id

APPLIED: Applied = {
    **dict.fromkeys(("messages", "model", "system", "max_tokens", "stop_sequences", "stream", "tools"), always),
    "tool_choice": always,  # its parts are looked at
    "chat_template_kwargs": always,
    "thinking": is_one_of({"type": "disabled"}),
}
"""Fields of requests that apply; all others are named as overruled."""

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
"""Types of errors by status; of others, `invalid_request_error` and `api_error`."""


def read_messages_request(
    body: Mapping[str, Any], known: PrefixMemory[Any, tuple[Message, ...]] | None = None
) -> TurnRequest:
    """Return the conversation of a request, and what of it does not apply.

    Args:
        known: what earlier requests of the session had as messages, which is not read again.

    Raises:
        RefusedRequestError: the request is not valid, or asks for what the gateway does not do.
    """
    sent = require_list(body.get("messages"), "messages", "a list of messages")
    known = known or PrefixMemory()
    messages = [message for found in known.values(sent, _read_message) for message in found]
    if body.get("system") is not None:
        messages = [make_message("system", read_text(body["system"], param="system")), *messages]
    if not messages:
        raise RefusedRequestError("messages need text, got thoughts alone", param="messages")
    overruled = find_overruled(body, APPLIED)
    choice = read_object(body, "tool_choice")
    applied = {"type": is_one_of("auto", "none"), "disable_parallel_tool_use": is_one_of(False)}
    overruled += [f"tool_choice.{name}" for name in find_overruled(choice, applied)]
    tools = tuple(map(_read_tool, read_list(body, "tools")))
    return TurnRequest(
        messages=tuple(messages),
        tools=() if choice.get("type") == "none" else tools,
        max_tokens=read_limit(body, "max_tokens"),
        stop=read_stop(body, "stop_sequences"),
        template_kwargs=read_template_kwargs(body),
        model=read_string(body, "model", "policy"),
        is_streamed=read_flag(body, "stream"),
        overruled=tuple(overruled),
    )


def messages_response(turn: Turn, request: TurnRequest) -> dict[str, Any]:
    """Return the body of the response, a message of the assistant."""
    assert turn.generation is not None
    assert turn.reply is not None
    counts = count_tokens(turn)
    if turn.reply.calls:
        reason = "tool_use"
    elif turn.generation.finish_reason != "stop":
        reason = "max_tokens"
    else:
        reason = "end_turn" if turn.stop is None else "stop_sequence"
    return {
        "id": f"msg_{turn.number}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": list(_blocks(turn)),
        "stop_reason": reason,
        "stop_sequence": turn.stop if reason == "stop_sequence" else None,
        "usage": {"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"]},
        "overruled_options": list(request.overruled),
    }


def messages_events(turn: Turn, request: TurnRequest) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed response."""
    message = messages_response(turn, request)
    usage = message["usage"]
    started: dict[str, Any] = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield {"type": "message_start", "message": {**message, **started}}
    for index, block in enumerate(message["content"]):
        yield from ({**event, "index": index} for event in _block_events(block))
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": usage["output_tokens"]}}
    yield {"type": "message_stop"}


def messages_error(status: int, message: str, code: str) -> dict[str, Any]:
    """Return an error in the form of this API; `code`: as in the errors of the others, for programs."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # by which clients know it
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


def _block_events(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a block of content, without its index."""
    if block["type"] == "tool_use":
        empty, parts = {**block, "input": {}}, [("input_json_delta", "partial_json", json.dumps(block["input"]))]
    elif block["type"] == "thinking":
        empty = {**block, "thinking": "", "signature": ""}
        parts = [("thinking_delta", "thinking", block["thinking"])]
    else:
        empty, parts = {**block, "text": ""}, [("text_delta", "text", block["text"])]
    yield {"type": "content_block_start", "content_block": empty}
    for kind, name, text in parts:
        for part in split_text(text):
            yield {"type": "content_block_delta", "delta": {"type": kind, name: part}}
    yield {"type": "content_block_stop"}


def _blocks(turn: Turn) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a reply: thoughts, text, and calls."""
    reply = turn.reply
    assert reply is not None
    if reply.reasoning:
        yield {"type": "thinking", "thinking": reply.reasoning, "signature": ""}
    if reply.content or not reply.calls:
        yield {"type": "text", "text": reply.content}
    for index, call in enumerate(reply.calls):
        found = parse_arguments(call.arguments)
        assert isinstance(found, dict), f"arguments that are no object: {call.arguments}"
        yield {"type": "tool_use", "id": f"toolu_{call_id(turn, index)}", "name": call.name, "input": found}


def _read_tool(tool: Any) -> Message:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        raise RefusedRequestError(f"tools need to be of the type custom, got {shown(kind)}", param="tools")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return make_function(function)


def _read_blocks(content: Any) -> list[Mapping[str, Any]]:
    """Return the blocks of a message's content; a text and null are one block of text."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RefusedRequestError(
            f"content needs to be a text or a list of blocks, got {shown(content)}", param="messages"
        )
    return content


def _read_message(before: object, message: Any) -> tuple[Message, ...]:
    """Return the messages of one of the API's: each result of a tool is a message of its own."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant", "system"):
        raise RefusedRequestError(f"a message needs the role user or assistant, got {shown(message)}", param="messages")
    role, texts = str(message["role"]), list[str]()
    calls: list[tuple[str, str, str]] = []
    results: list[Message] = []
    has_thoughts = False
    for block in _read_blocks(message.get("content")):
        kind = block.get("type")
        if role == "assistant" and kind == "tool_use":
            given = block.get("input")
            if not isinstance(block.get("name"), str) or not isinstance(given, Mapping):
                raise RefusedRequestError(f"tool_use needs name and input, got {shown(block)}", param="messages")
            calls.append((read_string(block, "id", param="messages"), block["name"], json.dumps(given)))
        elif role == "assistant" and kind in ("thinking", "redacted_thinking"):
            has_thoughts = True  # they are in the tokens of the turn
        elif role == "user" and kind == "tool_result":
            key = read_string(block, "tool_use_id", param="messages")
            results.append(make_message("tool", read_text(block.get("content")), tool_call_id=key))
        else:
            texts.append(read_text([block]))
    if not texts and (results or (has_thoughts and not calls)):
        return tuple(results)
    return (*results, make_message(role, "".join(texts), calls=calls))
