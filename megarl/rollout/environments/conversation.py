"""The tokens that a chat template adds to a conversation, without rebuilding those that were sampled.

    prompt k | output k (sampled ids) | end of the turn, messages, head of the next turn = prompt k + 1

Where the template writes the conversation so far differently from what was sampled, such as without its thoughts, the
next prompt is no extension, and begins another segment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megarl.errors import AgentError, DataError
from megarl.rollout.environments.environment import Message
from megarl.rollout.environments.load_environment import ENV

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "\ue000reply\ue001"
"""Stands for a reply, of which the tokens after it do not depend."""

PRIVATE_USE = 0xE100
"""First of the code points that stand for special tokens which a message has as plain text."""

PROBES = ("yes", "<think>\nlet me see\n</think>\n\nyes")
"""Replies with which a template is probed: a plain one, and one with a thought."""


@dataclass(frozen=True, slots=True)
class Extension:
    """What follows a reply in the token sequence."""

    token_ids: list[int]
    """Without forks, the tokens after the sampled ones; after a fork, the whole prompt."""
    is_fork: bool


class ChatRenderer:
    """Renders conversations by a tokenizer's chat template, to tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """`tokenizer`: needs a chat template."""
        self._tokenizer = tokenizer
        specials = sorted({str(token) for token in tokenizer.all_special_tokens} | _added_specials(tokenizer), key=len)
        self._specials = specials[::-1]
        self._special_pattern = re.compile("|".join(map(re.escape, self._specials)) or r"(?!)")
        codes = "".join(chr(PRIVATE_USE + i) for i in range(len(specials)))
        self._code_pattern = re.compile(f"([{codes}])") if codes else re.compile(r"(?!)")

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Return the tokens of a conversation that the policy continues.

        Args:
            tools: definitions of tools, as chat templates take them.

        Raises:
            AgentError: the template refuses the messages.
        """
        return self._encode(self._render(messages, tools))

    def extension(
        self,
        messages: Sequence[Message],
        reply: str,
        following: Sequence[Message],
        last_token: int | None,
        shown: Message | None,
        tools: Sequence[Message] = (),
    ) -> Extension:
        """Return the tokens after a sampled reply, up to the policy's next turn.

        Args:
            messages: the conversation that was replied to.
            reply: text of the reply.
            following: messages after the reply.
            last_token: the last sampled token, if known; if the template ends a turn with it, it is not repeated.
            shown: how the conversation shows the reply; None: as its text.
            tools: definitions of tools, as chat templates take them.

        Raises:
            AgentError: the template refuses the messages.
        """
        said = {"role": "assistant", "content": reply}
        now = datetime.now(UTC).astimezone()  # one date in all renderings that are compared
        before = self._render(messages, tools, now=now)
        with_reply = self._render([*messages, shown or said, *following], tools, now=now)
        stand_in = self._render([*messages, {"role": "assistant", "content": PLACEHOLDER}, *following], tools, now=now)
        head, _, tail = stand_in.rpartition(PLACEHOLDER)
        if head != before or not _is_extension(with_reply, before, self._escape(reply), tail):
            return Extension(self._encode(with_reply), is_fork=True)
        end = None if last_token is None else self._tokenizer.convert_ids_to_tokens(last_token)
        if isinstance(end, str) and end in self._specials and tail.startswith(end):
            tail = tail.removeprefix(end)
        return Extension(self._encode(tail), is_fork=False)

    def find_rewriting(self, *, role: str = "user") -> str | None:
        """Return what a probe of the template finds: how it rewrites earlier turns; None: it only appends."""
        start = [{"role": "user", "content": "is it?"}]
        for reply, what in zip(PROBES, ("earlier replies", "the thoughts of earlier replies"), strict=True):
            try:
                found = self.extension(start, reply, [{"role": role, "content": "why?"}], None, None)
            except AgentError as e:
                return str(e)
            if found.is_fork:
                return f"rewrites {what}"
        return None

    def _render(self, messages: Sequence[Message], tools: Sequence[Message], *, now: datetime | None = None) -> str:
        """Return the text of a conversation and the head of the policy's turn.

        It has code points for special tokens that messages and tools have as plain text.
        """
        escaped = [_map_text(message, self._escape) for message in messages]
        options: dict[str, Any] = {} if now is None else {"strftime_now": now.strftime}
        if tools:
            options["tools"] = [_map_text(tool, self._escape) for tool in tools]
        try:
            text = self._tokenizer.apply_chat_template(escaped, tokenize=False, add_generation_prompt=True, **options)
        except TemplateError as e:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise AgentError(f"the tokenizer's chat template refuses messages of the roles {roles}: {e}") from e
        assert isinstance(text, str)
        return text

    def _escape(self, text: str) -> str:
        return self._special_pattern.sub(lambda match: chr(PRIVATE_USE + self._specials.index(match.group())), text)

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a rendered text; special tokens are those that the template wrote."""
        token_ids: list[int] = []
        for number, part in enumerate(self._code_pattern.split(text)):
            is_code = number % 2 == 1
            plain = self._specials[ord(part) - PRIVATE_USE] if is_code else part
            token_ids += self._tokenizer.encode(plain, add_special_tokens=False, split_special_tokens=is_code)
        return token_ids


def require_chat_template(
    tokenizer: PreTrainedTokenizerBase, *, forks: str, refuses_forks: str | None, key: str = ENV
) -> None:
    """Return if the chat template can be used for environments and harnesses.

    Args:
        forks: what to do if the template rewrites earlier turns, `forbid` or `allow`.
        refuses_forks: why the algorithm cannot train on forked segments; None: it can.
        key: YAML key of the environment's section.

    Raises:
        DataError: the tokenizer has none, or one that rewrites earlier turns although segments must not be forked.
    """
    name = tokenizer.name_or_path or "this model"
    if tokenizer.chat_template is None:
        raise DataError(f"{key} needs a tokenizer with a chat template, that of {name} has none")
    if forks == "allow" and refuses_forks is None:
        return
    if forks == "allow":
        raise DataError(f"{key}.forks needs to be forbid, got allow: {refuses_forks}")
    found = ChatRenderer(tokenizer).find_rewriting()
    if found is not None:
        raise DataError(
            f"{key}.forks: forbid needs a chat template that only appends to a conversation, that of {name} "
            f"{found}; allow makes each rewritten conversation another segment of its episode"
        )


def _is_extension(text: str, before: str, reply: str, tail: str) -> bool:
    """Whether the text is prompt, reply and tail; templates may strip white space around the reply."""
    if not text.startswith(before) or not text.endswith(tail) or len(text) < len(before) + len(tail):
        return False
    return text[len(before) : len(text) - len(tail)].strip() == reply.strip()


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with all texts in it changed, in lists and mappings too; keys stay."""
    match value:
        case str():
            return change(value)
        case list() | tuple():
            return [_map_text(each, change) for each in value]
        case dict():
            return {key: _map_text(each, change) for key, each in value.items()}
        case _:
            return value


def _added_specials(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}


def bounded(message: Message, max_bytes: int) -> Message:
    """Return the message with its content cut to so many bytes of UTF-8, at a character."""
    content = message.get("content")
    if not isinstance(content, str) or len(content.encode()) <= max_bytes:
        return message
    return {**message, "content": content.encode()[:max_bytes].decode(errors="ignore")}
