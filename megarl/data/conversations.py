"""Read conversations from the shapes in which data files hold them: lists of messages, ShareGPT, Alpaca, HH-RLHF."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

Messages = list[dict[str, Any]]
"""Messages as chat templates take them: `role`, and `content`, a text."""

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "developer": "system",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
"""Names of roles in data files -> roles of chat templates; other names are kept."""

HH_TURN = re.compile(r"\n\n(Human|Assistant):")


class MessageError(Exception):
    """A value is no conversation; the message follows the place of the value."""


def read_messages(value: object) -> Messages:
    """Return a list of messages or its JSON text, OpenAI's or ShareGPT's, as chat templates take them.

    Parts of type text are joined, null keys removed, and arguments of calls parsed. Messages of the assistant and those
    with calls may have no content.

    Raises:
        MessageError: it is something else.
    """
    value = _parse(value)
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else type(value).__name__
        raise MessageError(f"needs a list of messages, got {kind}")
    return [_read_message(message, f"message {i}") for i, message in enumerate(value, start=1)]


def _read_message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessageError(f"needs messages {{role, content}}, got {message!r} as {name}")
    keys = {key: each for key, each in message.items() if each is not None}
    is_sharegpt = "from" in keys and "role" not in keys
    role = keys.pop("from" if is_sharegpt else "role", None)
    content = keys.pop("value" if is_sharegpt else "content", None)
    if not isinstance(role, str):
        raise MessageError(f"needs messages {{role, content}}, or {{from, value}}, got {message!r} as {name}")
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _read_call_text(content, name)}
    role = ROLES.get(role, role)
    if "function_call" in keys:
        keys["tool_calls"] = [{"type": "function", "function": keys.pop("function_call")}]
    if keys.get("tool_calls") in ([], None):
        keys.pop("tool_calls", None)
    if "tool_calls" in keys:
        keys["tool_calls"] = _read_calls(keys["tool_calls"], name)
    text = join_text(content)
    if content is None and (role == "assistant" or "tool_calls" in keys):
        text = ""
    if text is None:
        raise MessageError(
            f"needs messages whose content is a text, or a list of parts of type text, got {message!r} as {name}"
        )
    return {"role": role, "content": text, **keys}


def join_text(content: Any) -> str | None:
    """Return the text of a message's content: a text, or parts of type text, which are joined; None: it is neither."""
    match content:
        case str():
            return content
        case [*parts] if parts and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            texts: list[Any] = [part.get("text") for part in parts]
            return "".join(texts) if all(isinstance(text, str) for text in texts) else None
        case _:
            return None


def _read_calls(calls: object, name: str) -> list[dict[str, Any]]:
    """Return calls of tools with their arguments as objects, as chat templates expect them."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            raise MessageError(f"needs tool_calls {{function: {{name, arguments}}}}, got {call!r} in {name}")
        kept = {key: each for key, each in call.items() if each is not None} if function is not call else {}
        parsed = {key: _parse(each) if key == "arguments" else each for key, each in function.items()}
        found.append({"type": "function", **kept, "function": parsed})
    return found


def _read_call_text(content: object, name: str) -> list[dict[str, Any]]:
    calls = _parse(content)
    if not isinstance(calls, dict | list):
        raise MessageError(f"needs a call {{name, arguments}} as JSON, got {content!r} as {name}")
    return _read_calls(calls, name)


def _parse(value: Any) -> Any:
    """Return a value that may be written as JSON text; the text if it is not."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict | list) else value


def read_tools(value: object) -> list[dict[str, Any]]:
    """Return definitions of tools, a list or its JSON text; empty for null and an empty text.

    Raises:
        MessageError: it is something else.
    """
    tools = _parse(value) if value not in (None, "") else []
    if not isinstance(tools, list):
        raise MessageError(f"needs a list of tools, or its JSON text, got {type(value).__name__}")
    found = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MessageError(f"needs tools {{type: function, function: {{name, ...}}}}, got {tool!r}")
        found.append(tool if "function" in tool else {"type": "function", "function": _without_type(tool)})
    return found


def _without_type(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in tool.items() if key != "type"}


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that are null, at any depth.

    A column of Parquet has the keys of all rows in each of them: the arguments of every call, and null for those that a
    call does not have.
    """
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def find_trained(messages: Sequence[Mapping[str, Any]], start: int = 0) -> list[int]:
    """Return the indices of the assistant's messages from `start` on, less those with weight 0 or train false.

    Raises:
        MessageError: a weight is neither 0 nor 1, or a message of another role is to be trained on.
    """
    found = []
    for i, message in enumerate(messages):
        weight = message.get("weight", message.get("train"))
        if weight not in (None, 0, 1):
            raise MessageError(f"needs weights of 0 or 1, got {weight!r} in message {i + 1}")
        if message["role"] != "assistant" and message.get("train"):
            raise MessageError(f"trains on the assistant's messages alone, got train: true in message {i + 1}")
        if message["role"] == "assistant" and i >= start and weight != 0:
            found.append(i)
    return found


def without_weights(messages: Messages) -> Messages:
    """Return the messages without the keys that choose what is trained on."""
    return [{key: each for key, each in message.items() if key not in ("weight", "train")} for message in messages]


def split_pair(chosen: Messages, rejected: Messages) -> tuple[Messages, dict[str, Any], dict[str, Any]]:
    """Return the messages that both conversations begin with, and the last message of each.

    Raises:
        MessageError: they differ in more than one message of the assistant at the end, or not at all.
    """
    size = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    if size == len(chosen) == len(rejected):
        raise MessageError("hold the same answer; a preference needs two")
    if not len(chosen) == len(rejected) == size + 1:
        raise MessageError(
            "need conversations that differ in their last message alone, got "
            f"{len(chosen)} and {len(rejected)} messages of which the first {size} are equal"
        )
    if size == 0:
        raise MessageError("need a prompt that both begin with, got one message each")
    for message in (chosen[-1], rejected[-1]):
        if message["role"] != "assistant":
            raise MessageError(f"need to end with a message of the assistant, got {message['role']!r}")
    return chosen[:size], chosen[size], rejected[size]


def split_hh(text: str) -> tuple[str, str] | None:
    r"""Return the text of an HH-RLHF conversation up to its last `\n\nAssistant:`, and the answer; None: it is none."""
    turns = [*HH_TURN.finditer(text)]
    if not turns or text[: turns[0].start()].strip() or turns[0][1] != "Human" or turns[-1][1] != "Assistant":
        return None
    return text[: turns[-1].end()], text[turns[-1].end() :]


def read_hh(text: str) -> Messages:
    """Return the messages of an HH-RLHF conversation that `split_hh` accepts."""
    _, *parts = HH_TURN.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[name], "content": said.strip()} for name, said in zip(parts[::2], parts[1::2], strict=True)]
