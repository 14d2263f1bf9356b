"""What a client asks of the policy, whichever API it uses, and the errors that it gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megarl.rollout.environments.environment import Message
from megarl.rollout.gateway.chat_messages import message_digest

NOT_OF_THE_RUN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "ignore_eos",
    "min_tokens",
)
"""Sampling options that are overruled: the policy is trained on samples of its own distribution."""

SINGLE = ("n", "best_of")
"""Options that are refused if they ask for several completions."""


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
    model: str = "policy"
    """Any name, which is returned."""
    overruled: tuple[str, ...] = ()
    """Names of the client's options that do not apply."""

    @cached_property
    def prefix_keys(self) -> list[bytes]:
        """A hash of the first 0, 1, 2, ... messages, each with the tools."""
        keys = [hashlib.sha256(json.dumps(self.tools, sort_keys=True).encode()).digest()]
        for message in self.messages:
            keys.append(_extend(keys[-1], message))
        return keys

    @property
    def key(self) -> bytes:
        """Hash that is equal for requests of the same turn: a client sends one again if it has lost the answer."""
        limits = json.dumps([self.max_tokens, self.stop]).encode()
        return hashlib.sha256(self.prefix_keys[-1] + limits).digest()

    def key_after(self, reply: Message) -> bytes:
        """Return the entry of `prefix_keys` of requests that continue this one's messages and the reply."""
        return _extend(self.prefix_keys[-1], reply)


def _extend(key: bytes, message: Message) -> bytes:
    return hashlib.sha256(key + message_digest(message)).digest()


def find_overruled(body: Mapping[str, Any]) -> list[str]:
    """Return the names of options of a request that do not apply, because sampling is that of the run.

    Raises:
        RefusedRequestError: an option asks for what a single sample cannot be.
    """
    for name in SINGLE:
        if body.get(name) not in (None, 1):
            raise RefusedRequestError(f"{name} needs to be 1, got {body[name]!r}: send a request for each", param=name)
    found = [name for name in NOT_OF_THE_RUN if body.get(name) is not None]
    if body.get("tool_choice") not in (None, "auto", "none"):
        found.append("tool_choice")
    if body.get("parallel_tool_calls") is False:
        found.append("parallel_tool_calls")
    return found


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
            raise RefusedRequestError(f"{name} needs to be an integer of at least 1, got {value!r}", param=name)
        return value
    return None


def read_stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that end the reply.

    Raises:
        RefusedRequestError: they are no texts, or empty ones.
    """
    value = body.get("stop")
    stop = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
        raise RefusedRequestError(f"stop needs to be a text or a list of texts, got {value!r}", param="stop")
    return tuple(stop)


def read_functions(tools: Sequence[Any]) -> tuple[Message, ...]:
    """Return the definitions of functions that a request offers, in the form of chat completions.

    Raises:
        RefusedRequestError: a tool is no function, or has no name.
    """
    found = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        if kind != "function":
            raise RefusedRequestError(f"tools need to be of the type function, got {kind!r}", param="tools")
        function = tool.get("function", {key: tool[key] for key in tool if key != "type"})
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RefusedRequestError(f"a function in tools needs a name, got {tool!r}", param="tools")
        kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
        found.append({"type": "function", "function": kept})
    return tuple(found)
