"""The API `/v1/responses`: its requests as `TurnRequest`, and turns as its responses and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.rollout.environments.environment import Message
from megarl.rollout.gateway.chat_api import count_tokens, read_text, split_text
from megarl.rollout.gateway.chat_messages import make_message
from megarl.rollout.gateway.turn_request import (
    RefusedRequestError,
    TurnRequest,
    find_overruled,
    read_functions,
    read_limit,
)
from megarl.rollout.gateway.turns import Turn, call_id

UNSUPPORTED = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that refer to what a server keeps; clients send the whole conversation instead."""


def read_responses_request(body: Mapping[str, Any]) -> TurnRequest:
    """Return the conversation of a request, and what of it does not apply.

    Raises:
        RefusedRequestError: the request is not valid, or asks for what the gateway does not do.
    """
    for name in UNSUPPORTED:
        if body.get(name):
            raise RefusedRequestError(f"{name} is not supported: send the whole conversation as input", param=name)
    overruled = find_overruled(body)
    text = body.get("text")
    if isinstance(text, Mapping) and (text.get("format") or {}).get("type", "text") != "text":
        overruled.append("text.format")
    messages = _read_input(body.get("input"))
    if body.get("instructions") is not None:
        messages = [make_message("system", str(body["instructions"])), *messages]
    return TurnRequest(
        messages=tuple(messages),
        tools=() if body.get("tool_choice") == "none" else read_functions(body.get("tools") or ()),
        max_tokens=read_limit(body, "max_output_tokens"),
        model=str(body.get("model", "policy")),
        overruled=tuple(overruled),
    )


def responses_response(turn: Turn, request: TurnRequest, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response to the request `body`."""
    assert turn.generation is not None
    is_cut = turn.generation.finish_reason != "stop"
    counts = count_tokens(turn)
    return {
        "id": f"resp_{turn.number}",
        "object": "response",
        "created_at": 0,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": request.model,
        "output": list(_output(turn)),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        },
        "overruled_options": list(request.overruled),
    }


def responses_events(turn: Turn, request: TurnRequest, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed response."""
    response = responses_response(turn, request, body)
    started = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events = [{"type": "response.created", "response": started}, {"type": "response.in_progress", "response": started}]
    for index, item in enumerate(response["output"]):
        events += _item_events(index, item)
    last = "response.completed" if response["status"] == "completed" else "response.incomplete"
    events.append({"type": last, "response": response})
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    at = {"output_index": index, "item_id": item["id"]}
    added = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        yield {"type": "response.output_item.added", "output_index": index, "item": {**added, "arguments": ""}}
        for part in split_text(item["arguments"]):
            yield {"type": "response.function_call_arguments.delta", **at, "delta": part}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield {"type": "response.function_call_arguments.done", **at, **done}
    elif item["type"] == "message":
        (content,) = item["content"]
        at["content_index"] = 0
        empty = {**content, "text": ""}
        yield {"type": "response.output_item.added", "output_index": index, "item": {**added, "content": []}}
        yield {"type": "response.content_part.added", **at, "part": empty}
        for part in split_text(content["text"]):
            yield {"type": "response.output_text.delta", **at, "delta": part, "logprobs": []}
        yield {"type": "response.output_text.done", **at, "text": content["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **at, "part": content}
    else:
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _output(turn: Turn) -> Iterator[dict[str, Any]]:
    """Yield the items of a reply: thoughts, text, and calls."""
    reply, number = turn.reply, turn.number
    assert reply is not None
    if reply.reasoning:
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        yield {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": [thought], "status": "completed"}
    if reply.content or not reply.calls:
        content = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        yield {
            "type": "message",
            "id": f"msg_{number}",
            "role": "assistant",
            "status": "completed",
            "content": [content],
        }
    for index, call in enumerate(reply.calls):
        yield {
            "type": "function_call",
            "id": f"fc_{call_id(turn, index)}",
            "call_id": call_id(turn, index),
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }


def _read_input(value: Any) -> list[Message]:
    """Return the messages of the items: a reply's text and calls, which are items of their own, become one message."""
    if isinstance(value, str):
        return [make_message("user", value)]
    if not isinstance(value, list) or not value:
        raise RefusedRequestError(f"input needs to be a text or a list of items, got {value!r}", param="input")
    messages: list[Message] = []
    content, calls = "", list[tuple[str, str, str]]()

    def finish() -> None:
        """Add the reply whose calls have been read."""
        nonlocal content
        if calls:
            messages.append(make_message("assistant", content, calls=calls))
        content = ""
        calls.clear()

    for item in value:
        kind = item.get("type", "message") if isinstance(item, Mapping) else type(item).__name__
        if kind == "function_call":
            if not calls and messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
                content = messages.pop()["content"]
            calls.append((str(item.get("call_id", "")), str(item.get("name")), str(item.get("arguments") or "{}")))
            continue
        if kind == "reasoning":  # thoughts are in the tokens of the turn
            continue
        finish()
        if kind == "function_call_output":
            messages.append(
                make_message("tool", read_text(item.get("output")), tool_call_id=str(item.get("call_id", "")))
            )
        elif kind == "message" and isinstance(item.get("role"), str):
            messages.append(make_message(item["role"], read_text(item.get("content"))))
        else:
            raise RefusedRequestError(
                f"input needs messages, function calls and their outputs, got an item of type {kind!r}", param="input"
            )
    finish()
    return messages
