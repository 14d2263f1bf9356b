"""Messages of clients: in the form that chat templates take, and compared without what clients change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

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
