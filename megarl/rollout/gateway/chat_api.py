"""The API `/v1/chat/completions`: its requests as `TurnRequest`, and turns as its responses and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megarl.rollout.environments.environment import Message
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
    read_stop,
    read_string,
    read_template_kwargs,
    read_text,
    require_list,
    shown,
)
from megarl.rollout.gateway.turns import PrefixMemory, Turn, call_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

APPLIED: Applied = {
    **dict.fromkeys(("messages", "model", "tools", "max_tokens", "max_completion_tokens"), always),
    **dict.fromkeys(("stop", "stream", "stream_options", "logprobs", "n", "best_of"), always),
    "chat_template_kwargs": always,
    "add_generation_prompt": is_one_of(True),
    "continue_final_message": is_one_of(False),
    "tool_choice": is_one_of("auto", "none"),
    "parallel_tool_calls": is_one_of(True),
    "response_format": is_one_of({"type": "text"}),
    "top_logprobs": is_one_of(0),
    "store": is_one_of(False),
}
"""Fields of requests that apply; all others are named as overruled."""

CHUNK_CHARACTERS = 64
"""Length of the texts that a stream sends at once. A reply is streamed after it was sampled."""


def read_chat_request(body: Mapping[str, Any], known: PrefixMemory[Any, Message] | None = None) -> TurnRequest:
    """Return the conversation of a request, and what of it does not apply.

    Args:
        known: what earlier requests of the session had as messages, which is not read again.

    Raises:
        RefusedRequestError: the request is not valid, or asks for what the gateway does not do.
    """
    messages = require_list(body.get("messages"), "messages", "a list of messages")
    read_single(body, "n", "best_of")
    options = read_object(body, "stream_options")
    overruled = find_overruled(body, APPLIED)
    overruled += [f"stream_options.{name}" for name in find_overruled(options, {"include_usage": always})]
    known = known or PrefixMemory()
    return TurnRequest(
        messages=tuple(known.values(messages, lambda _, message: _read_message(message))),
        tools=() if body.get("tool_choice") == "none" else read_functions(read_list(body, "tools")),
        max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
        stop=read_stop(body),
        template_kwargs=read_template_kwargs(body),
        model=read_string(body, "model", "policy"),
        is_streamed=read_flag(body, "stream"),
        has_usage=read_flag(options, "include_usage"),
        has_logprobs=read_flag(body, "logprobs"),
        overruled=tuple(overruled),
    )


def chat_response(turn: Turn, request: TurnRequest, *, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Return the response.

    Args:
        tokenizer: to return the log-probabilities of the sampled tokens; None: they are not asked for.
    """
    choice = {"index": 0, "message": _message(turn), "finish_reason": _finish_reason(turn)}
    if tokenizer is not None:
        choice["logprobs"] = {"content": _logprobs(turn, tokenizer), "refusal": None}
    return {
        **_head(turn, request, "chat.completion"),
        "choices": [choice],
        "usage": count_tokens(turn),
        "overruled_options": list(request.overruled),
    }


def chat_chunks(
    turn: Turn, request: TurnRequest, *, usage: bool, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed response.

    Args:
        usage: end with a chunk that has the numbers of tokens.
        tokenizer: as for `chat_response`; the log-probabilities are in the first chunk.
    """
    head = _head(turn, request, "chat.completion.chunk")
    message = _message(turn)

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}

    first = chunk({"role": "assistant", "content": ""})
    if tokenizer is not None:
        first["choices"][0]["logprobs"] = {"content": _logprobs(turn, tokenizer), "refusal": None}
    yield first
    for name in ("reasoning_content", "content"):
        for part in split_text(message.get(name) or ""):
            yield chunk({name: part})
    for index, call in enumerate(message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, _finish_reason(turn))
    if usage:
        yield {**head, "choices": [], "usage": count_tokens(turn)}


def split_text(text: str) -> Iterator[str]:
    """Yield the text in the pieces of a stream."""
    for start in range(0, len(text), CHUNK_CHARACTERS):
        yield text[start : start + CHUNK_CHARACTERS]


def count_tokens(turn: Turn) -> dict[str, int]:
    """Return the numbers of tokens of prompt and reply."""
    assert turn.generation is not None
    prompt, reply = turn.num_prompt_tokens, len(turn.generation.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


def read_arguments(arguments: Any, *, param: str = "messages") -> str:
    """Return the arguments of a call as JSON text; some clients send them as an object.

    Raises:
        RefusedRequestError: they are neither.
    """
    if isinstance(arguments, Mapping):
        return json.dumps(arguments)
    if arguments is not None and not isinstance(arguments, str):
        raise RefusedRequestError(f"arguments of a call need to be a text, got {shown(arguments)}", param=param)
    return arguments or "{}"


def _read_message(message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RefusedRequestError(f"a message needs a role, got {shown(message)}", param="messages")
    if message.get("function_call") is not None:
        raise RefusedRequestError("function_call is not supported: send tool_calls", param="messages")
    sent = message.get("tool_calls")
    if sent is not None and not isinstance(sent, list):
        raise RefusedRequestError(f"tool_calls need to be a list, got {shown(sent)}", param="messages")
    calls = []
    for call in sent or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RefusedRequestError(f"tool_calls need functions with names, got {shown(call)}", param="messages")
        key = read_string(call, "id", param="messages")
        calls.append((key, function["name"], read_arguments(function.get("arguments"))))
    tool_call_id, name = (
        read_string(message, field, param="messages") if message.get(field) is not None else None
        for field in ("tool_call_id", "name")
    )
    text = read_text(message.get("content"))
    return make_message(message["role"], text, calls=calls, tool_call_id=tool_call_id, name=name)


def _head(turn: Turn, request: TurnRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.number}", "object": kind, "created": 0, "model": request.model}


def _message(turn: Turn) -> dict[str, Any]:
    reply = turn.reply
    assert reply is not None
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call_id(turn, index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(reply.calls)
        ]
    return message


def _finish_reason(turn: Turn) -> str:
    assert turn.generation is not None
    assert turn.reply is not None
    if turn.reply.calls:
        return "tool_calls"
    return "stop" if turn.generation.finish_reason == "stop" else "length"


def _logprobs(turn: Turn, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the sampled tokens, each as text and bytes, with its id and log-probability."""
    assert turn.generation is not None
    found = []
    for token_id, logprob in zip(turn.generation.token_ids.tolist(), turn.generation.logprobs.tolist(), strict=True):
        text = str(tokenizer.decode([token_id]))
        found.append(
            {
                "token": text,
                "token_id": token_id,
                "logprob": logprob,
                "bytes": list(text.encode()),
                "top_logprobs": [],
            }
        )
    return found
