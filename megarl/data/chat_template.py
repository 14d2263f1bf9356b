"""Render and tokenize a row's prompt by the prompt and chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.data import PromptFormat
from megarl.data.conversations import MessageError, Messages, read_messages, read_tools, without_nulls
from megarl.data.rows import PromptReader, Row
from megarl.data.tokenizer import describe_unknown_token, read_vocab_size
from megarl.errors import ConfigError, DataError
from megarl.model_files.model_config import read_stop_token_ids
from megarl.text import describe_error
from megarl.user_code import outcome_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLY = "reply8d1f"
"""Text of a message of the assistant, after which a template is searched for the end of the turn."""


class ChatTemplateError(Exception):
    """The code of a chat template fails on some messages."""


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    day: date,
    *,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    """Return the text of a conversation and the head of the policy's turn.

    Args:
        day: what the template takes for the current date; the time of day is midnight.
        add_generation_prompt: whether the head of the policy's turn is part of it.
        options: variables of the template, and further arguments of transformers; see `template_options`.

    Raises:
        ChatTemplateError: the template's code raised an exception.
    """
    render = partial(
        tokenizer.apply_chat_template,
        list(messages),
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        strftime_now=datetime.combine(day, time()).strftime,
        **options,
    )
    text, error = outcome_of(render)
    if error is not None:
        raise ChatTemplateError(describe_error(error)) from error
    assert isinstance(text, str)
    return text


def has_chat_template(tokenizer: PreTrainedTokenizerBase, name: str | None = None, *, key: str = "data") -> bool:
    """Return whether the tokenizer has a chat template for conversations.

    Args:
        name: of the template, as `chat_template_name` chooses it; None: the default one.
        key: YAML key of the section, for messages.

    Raises:
        DataError: it has no template of this name, or several of which none is the default.
    """
    templates, model = tokenizer.chat_template, tokenizer.name_or_path or "this model"
    found = templates if isinstance(templates, Mapping) else {} if templates is None else {"default": templates}
    if name is not None and name not in found:
        names = f"has those named {', '.join(sorted(found))}" if found else "has none"
        raise DataError(f"{key}.chat_template_name: the tokenizer of {model} has no chat template {name!r}, it {names}")
    if name is None and found and "default" not in found:
        raise DataError(
            f"the tokenizer of {model} needs a default chat template, got templates named {', '.join(sorted(found))}: "
            f"choose one with {key}.chat_template_name"
        )
    return bool(found)


def template_options(config: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the options for `apply_chat_template` that a section of the configuration chooses."""
    is_named = config.chat_template_name is not None and isinstance(tokenizer.chat_template, Mapping)
    named = {"chat_template": config.chat_template_name} if is_named else {}
    return {**config.chat_template_kwargs, **named}


def chat_template_source(tokenizer: PreTrainedTokenizerBase, name: str | None = None) -> str:
    """Return the source of a chat template of the tokenizer; without a name, of all of them one below the other."""
    templates = tokenizer.chat_template
    if not isinstance(templates, Mapping):
        return str(templates)
    return "\n".join(str(source) for each, source in templates.items() if name in (None, each))


def read_end_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens at which generation ends: eos, and the stop tokens of the model's folder.

    Raises:
        DataError: as `read_stop_token_ids`.
    """
    folder = Path(tokenizer.name_or_path or "")
    ids = read_stop_token_ids(folder) if (folder / "config.json").is_file() else ()
    return frozenset(each for each in (*ids, tokenizer.eos_token_id) if isinstance(each, int))


def find_turn_end(tokenizer: PreTrainedTokenizerBase, day: date, options: Mapping[str, Any]) -> list[int] | None:
    """Return the tokens that the chat template writes after the text of the assistant's last message.

    Args:
        options: as for `apply_chat_template`.

    Returns:
        None: the template writes no such messages.
    """
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": REPLY}]
    try:
        text = apply_chat_template(tokenizer, messages, day, add_generation_prompt=False, **options)
    except ChatTemplateError:
        return None
    _, found, end = text.rpartition(REPLY)
    return list(tokenizer.encode(end, add_special_tokens=False)) if found else None


class PromptTemplate:
    """Renders prompts according to `prompt_template`, `chat_template` and `system_prompt` of a section.

    Raises:
        ConfigError: the prompt template has no column in braces, or a system prompt is combined with
            `chat_template: never`.
        DataError: the tokenizer lacks the chat template that the configuration requires or names.
    """

    def __init__(
        self, config: PromptFormat, tokenizer: PreTrainedTokenizerBase, day: date, *, key: str = "data"
    ) -> None:
        """`day`: as for `apply_chat_template`; `key`: YAML key of the section, for messages."""
        self.reader = PromptReader(config, key=key)
        if config.system_prompt is not None and config.chat_template == "never":
            raise ConfigError(f"{key}.system_prompt needs a chat template, got {key}.chat_template: never")
        has_template = config.chat_template != "never" and has_chat_template(
            tokenizer, config.chat_template_name, key=key
        )
        if config.chat_template == "always" and not has_template:
            raise DataError(
                f"{key}.chat_template: always needs a tokenizer with a chat template, {_no_template(tokenizer)}"
            )
        if config.system_prompt is not None and not has_template:
            raise DataError(f"{key}.system_prompt needs a tokenizer with a chat template, {_no_template(tokenizer)}")
        self._config, self._key = config, key
        self.tokenizer, self._day, self._vocab_size = tokenizer, day, read_vocab_size(tokenizer)
        self.has_chat = has_template
        self._options = template_options(config, tokenizer)
        self._checked: tuple[Path, int] | None = None
        """File and line of the last row whose tools the template was seen to write."""

    @property
    def _model_name(self) -> str:
        """Name of the tokenizer's model, for messages."""
        return self.tokenizer.name_or_path or "this model"

    @property
    def source(self) -> str:
        """The source of the chat template."""
        return chat_template_source(self.tokenizer, self._config.chat_template_name)

    def render(self, row: Row, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the row's prompt as text for the policy to continue.

        Args:
            tools: definitions of tools; None: those of the row.

        Raises:
            DataError: the row has images, videos or audio, the field is missing or neither a string nor messages, the
                chat template rejects the prompt or leaves out tools, or the last message is one of the assistant while
                `last_assistant` is `error`. The message names file:line.
        """
        prompt = self.reader.prompt(row)
        given = self.tools(row) if tools is None else tools
        if isinstance(prompt, str) and not self.has_chat:
            if given:
                raise DataError(f"{row.where}: tools need a chat template, {self._reason_without()}")
            return prompt
        messages = self.question(row)
        is_continued = messages[-1]["role"] == "assistant"
        return self.render_messages(row, messages, given, is_continued=is_continued)

    def tools(self, row: Row) -> list[dict[str, Any]]:
        """Return the definitions of tools of a row, as chat templates take them; empty if it has none.

        Raises:
            DataError: they are something else; the message names file:line.
        """
        tools = self.reader.tools(row)
        try:
            return read_tools(without_nulls(tools) if row.has_filled_objects else tools)
        except MessageError as e:
            raise DataError(f"{row.where}: field {self._config.fields.tools!r} ({self._key}.fields.tools) {e}") from e

    def question(self, row: Row) -> Messages:
        """Return the messages of the row's prompt that the policy answers, after `last_assistant` was applied.

        The last one is of the assistant only if `last_assistant` is `continue`. Raises as `render`.
        """
        messages = self.conversation(row)
        if messages[-1]["role"] != "assistant" or self._config.last_assistant == "continue":
            return messages
        field, key = self.reader.prompt_field(row), f"{self._key}.last_assistant"
        if self._config.last_assistant == "error":
            raise DataError(
                f"{row.where}: the messages of field {field!r} ({self._key}.fields.prompt) end with one of the "
                f"assistant, which the policy would answer with a second one; {key}: drop removes it, {key}: continue "
                "lets the policy continue it"
            )
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not any(message["role"] != "system" for message in messages):
            raise DataError(f"{row.where}: {key}: drop leaves no message to answer in field {field!r}")
        return messages

    def render_messages(
        self,
        row: Row,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        is_continued: bool = False,
    ) -> str:
        """Return the text of messages of a row.

        Args:
            tools: definitions of tools, as chat templates take them.
            add_generation_prompt: as for `apply_chat_template`.
            is_continued: end within the last message, for the policy to continue it.

        Raises:
            DataError: the chat template rejects them, or leaves out the tools. The message names file:line.
        """
        options = {**self._options, "add_generation_prompt": add_generation_prompt and not is_continued}
        if is_continued:
            options["continue_final_message"] = True
        try:
            with_tools = {**options, "tools": list(tools)} if tools else options
            text = apply_chat_template(self.tokenizer, messages, self._day, **with_tools)
            if tools and self._checked != (row.path, row.line):
                if text == apply_chat_template(self.tokenizer, messages, self._day, **options):
                    raise DataError(
                        f"{row.where}: the tokenizer's chat template does not write the tools of field "
                        f"{self._config.fields.tools!r} ({self._key}.fields.tools), so that the policy would not see "
                        "them; choose another template, or remove the tools from the rows"
                    )
                self._checked = (row.path, row.line)
        except ChatTemplateError as e:
            what = "prompt" if add_generation_prompt else "conversation"
            raise DataError(f"{row.where}: the tokenizer's chat template refuses the {what}: {e}") from e
        return text

    def encode_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of messages, and 1 for those inside of generation marks of the template; once rendered."""
        encoded = self.tokenizer.apply_chat_template(
            [*messages],
            tools=list(tools) or None,
            return_dict=True,
            return_assistant_tokens_mask=True,
            strftime_now=datetime.combine(self._day, time()).strftime,
            **self._options,
        )
        return encoded["input_ids"], encoded["assistant_masks"]

    def conversation(self, row: Row) -> Messages:
        """Return the messages of the row's prompt, the system prompt included; raises as `render`."""
        return self.with_system_prompt(row, self.prompt_messages(row))

    def prompt_messages(self, row: Row) -> Messages:
        """Return the messages of the row's prompt without the system prompt; raises as `render`."""
        prompt = self.reader.prompt(row)
        if isinstance(prompt, str):
            return as_question(prompt)
        return self.messages(row, prompt, self.reader.prompt_field(row), f"{self._key}.fields.prompt")

    def with_system_prompt(self, row: Row, messages: Messages) -> Messages:
        """Return the messages after the system prompt of the section, if it has one.

        Raises:
            DataError: they have their own.
        """
        if self._config.system_prompt is None:
            return messages
        if messages[0]["role"] == "system":
            raise DataError(f"{row.where}: {self._key}.system_prompt would be the row's second system message")
        return [{"role": "system", "content": self._config.system_prompt}, *messages]

    def tokenize(self, texts: Sequence[str], rows: Sequence[Row]) -> list[list[int]]:
        """Tokenize the rendered prompts of rows.

        Chat templates contain their special tokens. Plain prompts get those that the tokenizer adds, such as bos,
        unless they begin with them. Of several bos at the beginning, such as one of the template and one of the row,
        one is kept.

        Raises:
            DataError: a text has a token that the model does not have; the message names file:line.
        """
        if self.has_chat:
            return [self._with_one_bos(ids) for ids in self.encode_rows(texts, rows)]
        added, num = self._added_tokens, len(self._added_tokens)
        return [
            self._with_one_bos(ids[num:] if num and ids[num : 2 * num] == added else ids)
            for ids in self.encode_rows(texts, rows, add_special_tokens=True)
        ]

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos, start = self.tokenizer.bos_token_id, 0
        while bos is not None and ids[start : start + 2] == [bos, bos]:
            start += 1
        return ids[start:]

    def tokenize_responses(self, texts: Sequence[str], rows: Sequence[Row]) -> list[list[int]]:
        """Tokenize texts that follow prompts, each with one token at its end that ends it; empty: no tokens.

        A text that ends with such tokens keeps the first of them alone. Another one gets the token with which the chat
        template ends a turn, if generation ends at it, or else eos. bos at the beginning is left out.

        Raises:
            DataError: as `tokenize`.
        """
        return [
            ids if not ids or ids[-1] in self._end_ids else [*ids, self._end]
            for ids in self.encode_rows([self._with_one_end(text) for text in texts], rows)
        ]

    def _with_one_end(self, text: str) -> str:
        """Return the text without bos at its beginning, and up to the first of the tokens that end it."""
        bos = self.tokenizer.bos_token
        while bos is not None and text != bos and text.startswith(bos):
            text = text.removeprefix(bos)
        match = self._end_pattern.search(text)
        return text if match is None else text[: match.end(1)]

    @cached_property
    def _turn_end(self) -> int | None:
        """The special token with which the chat template ends the assistant's turn, if there is one."""
        ids = (find_turn_end(self.tokenizer, self._day, self._options) or []) if self.has_chat else []
        return next((each for each in ids if each in self.tokenizer.added_tokens_decoder), None)

    @cached_property
    def _stop_ids(self) -> frozenset[int]:
        return read_end_ids(self.tokenizer)

    @cached_property
    def _end(self) -> int:
        """The token at the end of a response."""
        end = self._turn_end
        eos = self.tokenizer.eos_token_id
        assert isinstance(eos, int), eos
        return end if end is not None and end in self._stop_ids else eos

    @cached_property
    def _end_ids(self) -> frozenset[int]:
        """Tokens that end a response: those at which generation ends, and the end of the template's turns."""
        return self._stop_ids if self._turn_end is None else self._stop_ids | {self._turn_end}

    @cached_property
    def _end_pattern(self) -> re.Pattern[str]:
        known = self.tokenizer.added_tokens_decoder
        ends = "|".join(re.escape(known[each].content) for each in sorted(self._end_ids) if each in known)
        return re.compile(rf"({ends})(?:\s|{ends})*\Z" if ends else r"((?!))")

    @cached_property
    def _added_tokens(self) -> list[int]:
        """The tokens that the tokenizer puts before a plain prompt."""
        (plain,), (full,) = (self._encode(["a"], add_special_tokens=added) for added in (False, True))
        return next(full[:i] for i in range(len(full)) if full[i : i + len(plain)] == plain)

    def encode_rows(
        self, texts: Sequence[str], rows: Sequence[Row], *, add_special_tokens: bool = False
    ) -> list[list[int]]:
        """Return the tokens of texts of rows.

        Raises:
            DataError: a text has a token that the model does not have; the message names file:line.
        """
        encoded = self._encode(texts, add_special_tokens=add_special_tokens)
        for row, ids in zip(rows, encoded, strict=True):
            unknown = describe_unknown_token(self.tokenizer, ids, self._vocab_size)
            if unknown is not None:
                raise DataError(f"{row.where}: {unknown}")
        return encoded

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        # verbose would warn about texts longer than the model; the caller reports those with file and line.
        encoded = self.tokenizer(
            list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def messages(self, row: Row, value: object, field: str, key: str) -> Messages:
        """Return the messages in a value of a row.

        Args:
            field: of the value; `key`: the YAML key that names it, for messages.

        Raises:
            DataError: the value is no list of messages, or there is no chat template for them.
        """
        try:
            messages = read_messages(value, are_filled=row.has_filled_objects)
        except MessageError as e:
            raise DataError(f"{row.where}: field {field!r} ({key}) {e}") from e
        self.require_chat(row, f"field {field!r} ({key})")
        return messages

    def require_chat(self, row: Row, what: str) -> None:
        """Raise a `DataError` unless there is a chat template for the messages of a row."""
        if not self.has_chat:
            raise DataError(f"{row.where}: {what} holds messages, which need a chat template, {self._reason_without()}")

    def _reason_without(self) -> str:
        """Return why there is no chat template."""
        if self._config.chat_template == "never":
            return f"got {self._key}.chat_template: never"
        return f"the tokenizer of {self._model_name} has none"


def as_question(text: str) -> Messages:
    """Return a text as the message of a user."""
    return [{"role": "user", "content": text}]


def _no_template(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"the tokenizer of {tokenizer.name_or_path or 'this model'} has none"
