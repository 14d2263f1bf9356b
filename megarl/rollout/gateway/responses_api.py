"""The API `/v1/responses`: its requests as `TurnRequest`, and turns as its responses and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.rollout.environments.environment import Message
from megarl.rollout.gateway.chat_api import count_tokens, read_arguments, split_text
from megarl.rollout.gateway.turn_request import (
    Applied,
    RefusedRequestError,
    TurnRequest,
    always,
    find_overruled,
    is_one_of,
    make_message,
    read_flag,
    read_functions,
    read_limit,
    read_list,
    read_object,
    read_single,
    read_string,
    read_template_kwargs,
    read_text,
    require_list,
    shown,
)
from megarl.rollout.gateway.turns import PrefixMemory, Turn, call_id

UNSUPPORTED = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that refer to what a server keeps; clients send the whole conversation instead."""

APPLIED: Applied = {
    **dict.fromkeys(("input", "instructions", "model", "tools", "max_output_tokens", "stream", "n", "best_of"), always),
    **dict.fromkeys(("metadata", "text", "reasoning", "stream_options", "chat_template_kwargs"), always),
    **dict.fromkeys(UNSUPPORTED, is_one_of(False, "")),
    "tool_choice": is_one_of("auto", "none"),
    "parallel_tool_calls": is_one_of(True),
    "truncation": is_one_of("disabled"),
    "store": is_one_of(False),
}
"""Fields of requests that apply, or whose parts are looked at; all others are named as overruled."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What an item of the input completes: messages, and a reply that calls after it may belong to."""

    messages: tuple[Message, ...] = ()
    content: str | None = None
    """Text of the reply; None: there is no reply, or one of calls alone."""
    calls: tuple[tuple[str, str, str], ...] = ()

    def finish(self) -> tuple[Message, ...]:
        """Return the reply, if there is one."""
        if self.content is None and not self.calls:
            return ()
        return (make_message("assistant", self.content or "", calls=self.calls),)


def read_responses_request(body: Mapping[str, Any], known: PrefixMemory[Any, _Read] | None = None) -> TurnRequest:
    """Return the conversation of a request, and what of it does not apply.

    Args:
        known: what earlier requests of the session had as input, which is not read again.

    Raises:
        RefusedRequestError: the request is not valid, or asks for what the gateway does not do.
    """
    for name in UNSUPPORTED:
        if body.get(name):
            raise RefusedRequestError(f"{name} is not supported: send the whole conversation as input", param=name)
    read_single(body, "n", "best_of")
    overruled = find_overruled(body, APPLIED)
    for name, applied in (("text", {"format": is_one_of({"type": "text"})}), ("reasoning", {}), ("stream_options", {})):
        overruled += [f"{name}.{part}" for part in find_overruled(read_object(body, name), applied)]
    read_object(body, "metadata")
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = require_list(given, "input", "a text or a list of items")
    known = known or PrefixMemory()
    found = known.values(items, _read_item)
    messages = [message for each in found for message in each.messages] + [*found[-1].finish()]
    if body.get("instructions") is not None:
        messages = [make_message("system", read_string(body, "instructions")), *messages]
    if not messages:
        raise RefusedRequestError("input needs a message, got thoughts alone", param="input")
    return TurnRequest(
        messages=tuple(messages),
        tools=() if body.get("tool_choice") == "none" else read_functions(read_list(body, "tools")),
        max_tokens=read_limit(body, "max_output_tokens"),
        template_kwargs=read_template_kwargs(body),
        model=read_string(body, "model", "policy"),
        is_streamed=read_flag(body, "stream"),
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


def _read_item(before: _Read | None, item: Any) -> _Read:
    """Return what an item completes: a reply's text and calls, which are items of their own, become one message."""
    before = before or _Read()
    kind = item.get("type", "message") if isinstance(item, Mapping) else type(item).__name__
    if kind == "function_call":
        call = (
            read_string(item, "call_id", param="input"),
            read_string(item, "name", param="input"),
            read_arguments(item.get("arguments"), param="input"),
        )
        return _Read(content=before.content, calls=(*before.calls, call))
    if kind == "reasoning":  # thoughts are in the tokens of the turn
        return _Read(content=before.content, calls=before.calls)
    finished = before.finish()
    if kind == "function_call_output":
        key = read_string(item, "call_id", param="input")
        output = make_message("tool", read_text(item.get("output"), param="input"), tool_call_id=key)
        return _Read((*finished, output))
    if kind == "message" and isinstance(item.get("role"), str):
        text = read_text(item.get("content"), param="input")
        if item["role"] == "assistant":
            return _Read(finished, content=text)
        return _Read((*finished, make_message(item["role"], text)))
    raise RefusedRequestError(
        f"input needs messages, function calls and their outputs, got an item of type {shown(kind)}", param="input"
    )
