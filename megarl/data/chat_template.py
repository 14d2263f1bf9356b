"""Render and tokenize a row's prompt by the prompt and chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from megarl.config.data import PromptFormat
from megarl.data.rows import Row
from megarl.data.tokenizer import describe_unknown_token, read_vocab_size
from megarl.errors import ConfigError, DataError
from megarl.text import describe_error
from megarl.user_code import outcome_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "{prompt}"


class ChatTemplateError(Exception):
    """The code of a chat template fails on some messages."""


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], day: date, **options: Any
) -> str:
    """Return the text of a conversation and the head of the policy's turn.

    Args:
        day: what the template takes for the current date; the time of day is midnight.
        options: variables of the template.

    Raises:
        ChatTemplateError: the template's code raised an exception.
    """
    render = partial(
        tokenizer.apply_chat_template,
        list(messages),
        tokenize=False,
        add_generation_prompt=True,
        strftime_now=datetime.combine(day, time()).strftime,
        **options,
    )
    text, error = outcome_of(render)
    if error is not None:
        raise ChatTemplateError(describe_error(error)) from error
    assert isinstance(text, str)
    return text


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer has a chat template for conversations.

    Raises:
        DataError: it has several, of which none is the default.
    """
    templates = tokenizer.chat_template
    if isinstance(templates, Mapping) and "default" not in templates:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} needs a default chat template, got templates "
            f"named {', '.join(sorted(templates))}: save the one to use as chat_template.jinja in the model folder"
        )
    return templates is not None


def chat_template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the source of the tokenizer's chat template, or of all of them one below the other."""
    templates = tokenizer.chat_template
    return "\n".join(map(str, templates.values())) if isinstance(templates, Mapping) else str(templates)


class PromptTemplate:
    """Renders prompts according to `prompt_template`, `chat_template` and `system_prompt` of a section.

    Raises:
        ConfigError: the template lacks `{prompt}`, or a system prompt is combined with `chat_template: never`.
        DataError: the tokenizer lacks the chat template that the configuration requires, or has several and no default.
    """

    def __init__(
        self, config: PromptFormat, tokenizer: PreTrainedTokenizerBase, day: date, *, key: str = "data"
    ) -> None:
        """`day`: as for `apply_chat_template`; `key`: YAML key of the section, for messages."""
        if PLACEHOLDER not in config.prompt_template:
            raise ConfigError(f"{key}.prompt_template needs {PLACEHOLDER} in it, got {config.prompt_template!r}")
        if config.system_prompt is not None and config.chat_template == "never":
            raise ConfigError(f"{key}.system_prompt needs a chat template, got {key}.chat_template: never")
        has_template = config.chat_template != "never" and has_chat_template(tokenizer)
        if config.chat_template == "always" and not has_template:
            raise DataError(
                f"{key}.chat_template: always needs a tokenizer with a chat template, {_no_template(tokenizer)}"
            )
        if config.system_prompt is not None and not has_template:
            raise DataError(f"{key}.system_prompt needs a tokenizer with a chat template, {_no_template(tokenizer)}")
        self._config, self._key = config, key
        self._tokenizer, self._day, self._vocab_size = tokenizer, day, read_vocab_size(tokenizer)
        self._chat = has_template

    def render(self, row: Row) -> str:
        """Return the row's prompt as text for the policy to continue.

        Raises:
            DataError: the field is missing or neither a string nor messages, or the chat template rejects the prompt.
                The message names file:line.
        """
        prompt = row.value(self._config.fields.prompt, f"{self._key}.fields.prompt")
        if isinstance(prompt, str) and not self._chat:
            return self._fill(prompt)
        messages = self.conversation(row)
        try:
            return apply_chat_template(self._tokenizer, messages, self._day)
        except ChatTemplateError as e:
            raise DataError(f"{row.where}: the tokenizer's chat template refuses the prompt: {e}") from e

    def conversation(self, row: Row) -> list[dict[str, Any]]:
        """Return the messages of the row's prompt, the system prompt included; raises as `render`."""
        prompt = row.value(self._config.fields.prompt, f"{self._key}.fields.prompt")
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": self._fill(prompt)}]
        else:
            messages = self._messages(row, prompt)
        if self._config.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise DataError(f"{row.where}: {self._key}.system_prompt would be the row's second system message")
            messages = [{"role": "system", "content": self._config.system_prompt}, *messages]
        return messages

    def _fill(self, prompt: str) -> str:
        # Not str.format: templates may hold other braces, as in \boxed{}.
        return self._config.prompt_template.replace(PLACEHOLDER, prompt)

    def tokenize(self, texts: Sequence[str], rows: Sequence[Row]) -> list[list[int]]:
        """Tokenize the rendered prompts of rows.

        Chat templates contain their special tokens. Plain prompts get those that the tokenizer adds, such as bos,
        unless they begin with them.

        Raises:
            DataError: a text has a token that the model does not have; the message names file:line.
        """
        if self._chat:
            return self._encode_rows(texts, rows, add_special_tokens=False)
        added, num = self._added_tokens, len(self._added_tokens)
        return [
            ids[num:] if num and ids[num : 2 * num] == added else ids
            for ids in self._encode_rows(texts, rows, add_special_tokens=True)
        ]

    def tokenize_rows(self, rows: Sequence[Row]) -> list[list[int]]:
        """Render and tokenize the prompts of rows.

        Raises:
            DataError: as `render` and `tokenize`, or a prompt has no tokens.
        """
        prompts = self.tokenize([self.render(row) for row in rows], rows)
        self._require_tokens(rows, prompts, "prompt")
        return prompts

    def tokenize_responses(
        self, rows: Sequence[Row], texts: Sequence[str], name: Literal["response", "chosen", "rejected"]
    ) -> list[list[int]]:
        """Tokenize texts that follow the prompts of rows, each with eos at its end, which is not repeated.

        Args:
            name: key of the texts' field in the section `fields`.

        Raises:
            DataError: as `tokenize`, or a text has no tokens.
        """
        responses = self._encode_rows(texts, rows, add_special_tokens=False)
        self._require_tokens(rows, responses, name)
        eos = self._tokenizer.eos_token_id
        return [ids if ids[-1] == eos else [*ids, eos] for ids in responses]

    def _require_tokens(self, rows: Sequence[Row], encoded: Sequence[list[int]], name: str) -> None:
        for row, ids in zip(rows, encoded, strict=True):
            if not ids:
                field = getattr(self._config.fields, name)
                raise DataError(f"{row.where}: field {field!r} ({self._key}.fields.{name}) holds no tokens")

    @cached_property
    def _added_tokens(self) -> list[int]:
        """The tokens that the tokenizer puts before a plain prompt."""
        (plain,), (full,) = (self._encode(["a"], add_special_tokens=added) for added in (False, True))
        return next(full[:i] for i in range(len(full)) if full[i : i + len(plain)] == plain)

    def _encode_rows(self, texts: Sequence[str], rows: Sequence[Row], *, add_special_tokens: bool) -> list[list[int]]:
        encoded = self._encode(texts, add_special_tokens=add_special_tokens)
        for row, ids in zip(rows, encoded, strict=True):
            unknown = describe_unknown_token(self._tokenizer, ids, self._vocab_size)
            if unknown is not None:
                raise DataError(f"{row.where}: {unknown}")
        return encoded

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        # verbose would warn about texts longer than the model; the caller reports those with file and line.
        encoded = self._tokenizer(
            list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def _messages(self, row: Row, prompt: Any) -> list[dict[str, Any]]:
        field = f"field {self._config.fields.prompt!r} ({self._key}.fields.prompt)"
        if not isinstance(prompt, list) or not prompt:
            kind = "an empty list" if prompt == [] else type(prompt).__name__
            raise DataError(f"{row.where}: {field} needs a string or a list of messages, got {kind}")
        messages = []
        for message in prompt:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise DataError(f"{row.where}: {field} needs messages {{role, content}}, got {message!r}")
            content = _join_content(message)
            if content is None:
                raise DataError(
                    f"{row.where}: {field} needs messages {{role, content}} whose content is a text, or a list of "
                    f"parts of type text, got {message!r}"
                )
            messages.append({**message, "content": content})
        if not self._chat:
            reason = (
                f"got {self._key}.chat_template: never"
                if self._config.chat_template == "never"
                else _no_template(self._tokenizer)
            )
            raise DataError(f"{row.where}: {field} holds messages, which need a chat template, {reason}")
        return messages


def _join_content(message: Mapping[str, Any]) -> str | None:
    """Return the text of a message: its content, or the parts of it joined; None if it has other contents than text.

    A message with calls of tools may have no content, as in OpenAI's API.
    """
    match message.get("content"):
        case str(content):
            return content
        case None if message.get("tool_calls"):
            return ""
        case [*parts] if parts and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            texts = [part.get("text") for part in parts]
            return "".join(texts) if all(isinstance(text, str) for text in texts) else None
        case _:
            return None


def _no_template(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"the tokenizer of {tokenizer.name_or_path or 'this model'} has none"
