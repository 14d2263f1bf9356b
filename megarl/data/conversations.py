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
"""Names of roles in data files, in any case -> roles of chat templates; other names are kept."""

STANDARD_ROLES = ("system", "user", "assistant", "tool")

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of the parts of a content that are text, of chat completions and of the API of responses."""

HH_TURN = re.compile(r"\n\n(Human|Assistant):")


class MessageError(Exception):
    """A value is no conversation; the message follows the place of the value."""


def read_messages(value: object, *, are_filled: bool = False) -> Messages:
    """Return a list of messages or its JSON text, OpenAI's or ShareGPT's, as chat templates take them.

    Parts of text are joined, null content is an empty text, other null keys are removed, and arguments of calls parsed.
    Messages of the assistant and those with calls may lack content.

    Args:
        are_filled: whether objects below the messages have null for keys that they lack, as in columns of a table.

    Raises:
        MessageError: it is something else.
    """
    value = _parse(value)
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else type(value).__name__
        raise MessageError(f"needs a list of messages, got {kind}")
    return [_read_message(message, f"message {i}", are_filled) for i, message in enumerate(value, start=1)]


def _read_message(message: object, name: str, is_filled: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessageError(f"needs messages {{role, content}}, got {message!r} as {name}")
    keys = {key: without_nulls(each) if is_filled else each for key, each in message.items() if each is not None}
    is_sharegpt = "from" in keys and "role" not in keys
    role = keys.pop("from" if is_sharegpt else "role", None)
    content_key = "value" if is_sharegpt else "content"
    content = keys.pop(content_key, None)
    if not isinstance(role, str):
        raise MessageError(f"needs messages {{role, content}}, or {{from, value}}, got {message!r} as {name}")
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _read_call_text(content, name)}
    role = ROLES.get(role.lower(), role.lower() if role.lower() in STANDARD_ROLES else role)
    if "function_call" in keys:
        keys["tool_calls"] = [{"type": "function", "function": keys.pop("function_call")}]
    if keys.get("tool_calls") in ([], None):
        keys.pop("tool_calls", None)
    if "tool_calls" in keys:
        keys["tool_calls"] = _read_calls(keys["tool_calls"], name)
    text = join_text(content)
    if text is None or not (content_key in message or role == "assistant" or "tool_calls" in keys):
        raise MessageError(
            f"needs messages whose content is a text, null, or a list of parts of type text, got {message!r} as {name}"
        )
    return {"role": role, "content": text, **keys}


def join_text(content: Any) -> str | None:
    """Return the text of a message's content: a text, null, or a list of parts of text; None: it is none of these.

    Parts are joined without a separator, as chat templates write them that take lists of parts.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [_part_text(part) for part in content]
    return "".join(text for text in texts if text is not None) if None not in texts else None


def _part_text(part: object) -> str | None:
    """Return the text of a part of a content; None: it has another type, such as an image."""
    if isinstance(part, Mapping):
        kind = part.get("type", "text")
        part = part.get("refusal" if kind == "refusal" else "text") if kind in TEXT_PARTS else None
    return part if isinstance(part, str) else None


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


WEIGHTS = ("weight", "train", "step_loss_mask")
"""Keys of a message that say whether it is trained on: OpenAI's, a boolean, slime's."""


def find_trained(messages: Sequence[Mapping[str, Any]], start: int = 0) -> list[int]:
    """Return the indices of the assistant's messages from `start` on, less those with weight 0 or train false.

    slime's `step_loss_mask` is a weight.

    Raises:
        MessageError: a weight is neither 0 nor 1, or a message of another role is to be trained on.
    """
    found = []
    for i, message in enumerate(messages):
        weights = {key: message[key] for key in WEIGHTS if message.get(key) is not None}
        weight = next(iter(weights.values()), None)
        if weight not in (None, 0, 1):
            raise MessageError(f"needs weights of 0 or 1, got {weight!r} in message {i + 1}")
        if any(each != weight for each in weights.values()):
            named = ", ".join(f"{key}: {each!r}" for key, each in weights.items())
            raise MessageError(f"needs weights that agree, got {named} in message {i + 1}")
        if message["role"] != "assistant" and message.get("train"):
            raise MessageError(f"trains on the assistant's messages alone, got train: true in message {i + 1}")
        if message["role"] == "assistant" and i >= start and weight != 0:
            found.append(i)
    return found


def has_text(message: Mapping[str, Any]) -> bool:
    """Whether a message of the assistant has a text, thoughts or calls."""
    return bool(message["content"].strip() or message.get("reasoning_content") or message.get("tool_calls"))


def without_weights(messages: Messages) -> Messages:
    """Return the messages without the keys that choose what is trained on."""
    return [{key: each for key, each in message.items() if key not in WEIGHTS} for message in messages]


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
