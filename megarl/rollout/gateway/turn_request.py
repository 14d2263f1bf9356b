"""What a client asks of the policy, whichever API it uses: its messages and settings, and the errors that it gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from megarl.config.data import describe_bad_template_kwargs
from megarl.data.conversations import join_text
from megarl.rollout.environments.environment import Message
from megarl.text import replace_surrogates


def make_message(
    role: str,
    content: str,
    *,
    calls: Sequence[tuple[str, str, str]] = (),
    tool_call_id: str | None = None,
    name: str | None = None,
) -> Message:
    """Return a message as chat templates take it.

    Args:
        calls: id, name of the function, and arguments as JSON of each tool call.
        tool_call_id: of a tool's result, the call that it belongs to.
        name: of the author.
    """
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": key, "type": "function", "function": {"name": function, "arguments": parse_arguments(arguments)}}
            for key, function, arguments in calls
        ]
    if tool_call_id is not None:
        message["tool_call_id"] = tool_call_id
    if name is not None and role != "assistant":
        message["name"] = name
    return message


def parse_arguments(arguments: str) -> Any:
    """Return the arguments of a call as an object, which chat templates expect; as text if they are none.

    Objects that cannot be written again are text too: with surrogates, nested too deeply, numbers of thousands of
    digits or that are not finite.
    """
    try:
        parsed = from_json(replace_surrogates(arguments), allow_inf_nan=False)
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def message_digest(message: Message) -> bytes:
    """Return a hash that is equal for messages which differ in ids of calls, order of keys and nulls only.

    Clients do not return thoughts, and strip white space around replies: neither is compared.
    """
    is_reply = message["role"] == "assistant"
    content = message["content"]
    compared = {
        "role": message["role"],
        "content": content.strip() if is_reply else content,
        "name": message.get("name"),
        "calls": [_without_nulls(call["function"]) for call in message.get("tool_calls", ())],
    }
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).digest()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(each) for each in value]
    return value


MAX_SHOWN = 200
"""Longest text of a wrong value in a message."""

Applied = Mapping[str, Callable[[Any], bool]]
"""By name, the fields of a request that the gateway applies: whether it does so with a value."""


class RefusedRequestError(Exception):
    """A request that the gateway does not answer; the message is for the client."""

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        """`code`: for programs; the limit, if one has ended the episode. `param`: the field that is wrong."""
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A conversation that the policy is to continue."""

    messages: tuple[Message, ...]
    """The whole conversation, as chat templates take it."""
    tools: tuple[Message, ...] = ()
    """Definitions of functions: `{"type": "function", "function": {...}}`."""
    max_tokens: int | None = None
    """The client's limit of the reply; None: that of the run."""
    stop: tuple[str, ...] = ()
    """The reply ends with the first of these texts."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, which replace those of the run's configuration."""
    model: str = "policy"
    """Any name, which is returned."""
    is_streamed: bool = False
    """Whether the client reads the reply as a stream of events."""
    has_usage: bool = False
    """Whether a stream of `/v1/chat/completions` ends with the numbers of tokens."""
    has_logprobs: bool = False
    """Whether the client asks for the log-probabilities of the sampled tokens."""
    overruled: tuple[str, ...] = ()
    """Names of the client's options that do not apply."""


def always(value: object) -> bool:
    """Return True: a field of `Applied` applies with each value."""
    return True


def is_one_of(*values: object) -> Callable[[Any], bool]:
    """Return the rule of `Applied` for a field that applies with these values alone."""
    return lambda value: any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def find_overruled(body: Mapping[str, Any], applied: Applied) -> list[str]:
    """Return the names of fields of a request that do not apply; null and empty lists and objects ask for nothing.

    Sampling options are among them, because the policy is trained on samples of its own distribution.
    """
    return [
        name
        for name, value in body.items()
        if value is not None and value != [] and value != {} and not (name in applied and applied[name](value))
    ]


def shown(value: object) -> str:
    """Return a value of a request for a message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def wrong_field(name: str, needed: str, value: object) -> RefusedRequestError:
    """Return the error for a field that is not what it needs to be."""
    return RefusedRequestError(f"{name} needs to be {needed}, got {shown(value)}", param=name)


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """Return whether a field is true; a missing one is not.

    Raises:
        RefusedRequestError: it is no boolean.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong_field(name, "true or false", value)
    return bool(value)


def read_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that is an object; a missing one is empty.

    Raises:
        RefusedRequestError: it is no object.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise wrong_field(name, "an object", value)
    return value or {}


def read_list(body: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return a field that is a list; a missing one is empty.

    Raises:
        RefusedRequestError: it is no list.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise wrong_field(name, "a list", value)
    return value or []


def require_list(value: Any, name: str, needed: str) -> list[Any]:
    """Return a list that is not empty; `needed`: what the field `name` needs to be.

    Raises:
        RefusedRequestError: it is no list, or empty.
    """
    if not isinstance(value, list) or not value:
        raise wrong_field(name, needed, value)
    return value


def read_string(body: Mapping[str, Any], name: str, default: str = "", *, param: str | None = None) -> str:
    """Return a field that is a text; `param`: the field of the request that it belongs to.

    Raises:
        RefusedRequestError: it is no text.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RefusedRequestError(f"{name} needs to be a text, got {shown(value)}", param=param or name)
    return default if value is None else value


def read_text(content: Any, *, param: str = "messages") -> str:
    """Return the text of a message's content, as `join_text`.

    Args:
        param: field of the request that the message belongs to.

    Raises:
        RefusedRequestError: it is neither a text, parts of text, nor null.
    """
    text = join_text(content)
    if text is not None:
        return text
    if not isinstance(content, list):
        raise RefusedRequestError(f"content needs to be a text or a list of parts, got {shown(content)}", param=param)
    part = next(part for part in content if join_text([part]) is None)
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RefusedRequestError(f"content needs parts of text, got one of type {shown(kind)}", param=param)


def read_template_kwargs(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the variables of the chat template that a request sets in `chat_template_kwargs`.

    Raises:
        RefusedRequestError: they are no object, or one of them is set by megarl.
    """
    values = read_object(body, "chat_template_kwargs")
    problem = describe_bad_template_kwargs(values)
    if problem is not None:
        raise RefusedRequestError(f"chat_template_kwargs: {problem}", param="chat_template_kwargs")
    return values


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the client's limit of tokens under the first of the names that it uses.

    Raises:
        RefusedRequestError: it is no positive integer.
    """
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise wrong_field(name, "an integer of at least 1", value)
        return value
    return None


def read_stop(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    """Return the texts that end the reply.

    Raises:
        RefusedRequestError: they are no texts, or empty ones.
    """
    value = body.get(name)
    stop = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
        raise wrong_field(name, "a text or a list of texts", value)
    return tuple(stop)


def read_single(body: Mapping[str, Any], *names: str) -> None:
    """Return if each of the fields asks for a single completion.

    Raises:
        RefusedRequestError: one asks for several.
    """
    for name in names:
        value = body.get(name)
        if value is not None and (value != 1 or isinstance(value, bool)):
            raise RefusedRequestError(f"{name} needs to be 1, got {shown(value)}: send a request for each", param=name)


def read_functions(tools: Sequence[Any]) -> tuple[Message, ...]:
    """Return the definitions of functions that a request offers, in the form of chat completions.

    Raises:
        RefusedRequestError: a tool is no function, or a part of it is of a wrong type.
    """
    found = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        if kind != "function":
            raise RefusedRequestError(f"tools need to be of the type function, got {shown(kind)}", param="tools")
        function = tool.get("function", {key: tool[key] for key in tool if key != "type"})
        found.append(make_function(function))
    return tuple(found)


def make_function(function: Any) -> Message:
    """Return the definition of a function in the form of chat completions.

    Raises:
        RefusedRequestError: a part of it is of a wrong type.
    """
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RefusedRequestError(f"a function in tools needs a name, got {shown(function)}", param="tools")
    for name, kind, needed in (("description", str, "a text"), ("parameters", Mapping, "an object")):
        value = function.get(name)
        if value is not None and not isinstance(value, kind):
            raise RefusedRequestError(
                f"{name} of the function {function['name']} in tools needs to be {needed}, got {shown(value)}",
                param="tools",
            )
    kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
    return {"type": "function", "function": kept}
