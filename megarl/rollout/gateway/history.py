"""Conversations as chains of exchanges, and the few of them that stand for a long one when it is rendered.

    exchange 0: question | reply    exchange 1: tool's result | reply    exchange 2: tool's result | reply    ...

What a chat template writes for new messages depends on the messages before by their kinds alone: which roles there
are, whether replies have thoughts and calls, and what marks of the template their texts have. New messages are
therefore rendered after exchanges in which each kind occurs, instead of after the whole conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megarl.rollout.environments.environment import Message

Shape = tuple[object, ...]

_MARK = re.compile(r"<[^<>{}%'\"\\\s]+>|\[/?[A-Z_]+\]")
"""Marks in the source of a chat template, such as `</think>` or `[INST]`."""


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """Messages that the policy was given, and its reply."""

    before: Exchange | None
    """The exchange before; None: this is the first one."""
    given: tuple[Message, ...]
    reply: Message
    """The reply with its thoughts and calls apart from its content."""
    text_reply: Message
    """The reply with its text as content."""
    shapes: tuple[Shape, ...]
    """Kinds of the messages, that of the reply last; runs of equal kinds are one."""
    depth: int
    """Number of exchanges up to this one."""
    summary: tuple[Exchange, ...] = ()
    """Exchanges that stand for all up to this one: each kind occurs, the last reply is of the kind of this one, and
    messages follow replies of the same kinds as in the conversation."""


class Exchanges:
    """Makes exchanges for conversations in one chat template."""

    def __init__(self, chat_template: str) -> None:
        self._marks = _find_marks(chat_template)

    def follow(
        self, before: Exchange | None, given: Sequence[Message], reply: Message, text_reply: Message | None = None
    ) -> Exchange:
        """Return the next exchange; `text_reply`: the reply with its text as content, by default as it is."""
        text_reply = text_reply or reply
        shapes = tuple(self._shapes([*given, {**reply, "content": f"{reply['content']}{text_reply['content']}"}]))
        known = () if before is None else before.summary
        exchange = Exchange(
            before=before,
            given=tuple(given),
            reply=reply,
            text_reply=text_reply,
            shapes=shapes,
            depth=1 if before is None else before.depth + 1,
        )
        exchange.summary = _summarize(known, exchange)
        return exchange

    def read(self, messages: tuple[Message, ...]) -> tuple[Exchange | None, tuple[Message, ...]]:
        """Return the exchanges of a conversation, as the last one, and the messages after it."""
        last: Exchange | None = None
        start = 0
        for end, message in enumerate(messages):
            if message["role"] == "assistant":
                last, start = self.follow(last, messages[start:end], message), end + 1
        return last, messages[start:]

    def _shapes(self, messages: Sequence[Message]) -> Iterator[Shape]:
        last = None
        for message in messages:
            content = message["content"]
            marks = frozenset(self._marks.findall(content))
            num_calls = min(2, len(message.get("tool_calls", ())))
            shape = (message["role"], bool(content.strip()), marks, num_calls, frozenset(message))
            if shape != last:
                yield shape
            last = shape


def whole(last: Exchange | None) -> list[Exchange]:
    """Return all exchanges up to the last one."""
    found = []
    while last is not None:
        found.append(last)
        last = last.before
    return found[::-1]


def flatten(exchanges: Sequence[Exchange], *, as_text: bool) -> list[Message]:
    """Return the messages of exchanges; `as_text`: replies have their text as content."""
    return [message for each in exchanges for message in (*each.given, each.text_reply if as_text else each.reply)]


def _summarize(known: tuple[Exchange, ...], exchange: Exchange) -> tuple[Exchange, ...]:
    """Return exchanges that stand for the known ones and another one, without detours that show nothing new.

    The known ones are cut after the last reply of the kind of the new one, if each kind still occurs.
    """
    for end in range(len(known), 0, -1):
        seen = {each.shapes for each in known[:end]}
        if known[end - 1].shapes[-1] == exchange.shapes[-1] and seen.issuperset(
            each.shapes for each in (*known[end:], exchange)
        ):
            return known[:end]
    return (*known, exchange)


@lru_cache
def _find_marks(chat_template: str) -> re.Pattern[str]:
    marks = sorted(set(_MARK.findall(chat_template)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")
