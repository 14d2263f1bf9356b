"""Load demonstrations: prompts with responses, and conversations whose assistant's turns are trained on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.batch.trajectory import Trajectory
from megarl.config.data import DataConfig
from megarl.data.assistant_turns import Conversation, ConversationTokenizer
from megarl.data.chat_template import PromptTemplate, as_question
from megarl.data.conversations import MessageError, Messages, find_trained, has_text, without_weights
from megarl.data.prompts import OverlongFilter, batch_rows
from megarl.data.rows import (
    INSTRUCTION,
    INSTRUCTION_OUTPUT,
    ExplicitFields,
    Row,
    read_instruction,
    read_rows,
    refuse_media,
    track,
)
from megarl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def load_demonstrations(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, path: str | None = None
) -> list[Trajectory]:
    """Return the samples that `tokenize_demonstrations` yields for the rows of `path`; raises as it does."""
    rows = read_rows(path or config.file)
    return [*chain.from_iterable(tokenize_demonstrations(config, tokenizer, rows, max_tokens=max_tokens, path=path))]


def tokenize_demonstrations(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Row],
    *,
    max_tokens: int,
    path: str | None = None,
) -> Iterator[list[Trajectory]]:
    """Yield the samples of each row in order, with the sample's index as `group_id`; nothing for a row that is dropped.

    A conversation has several samples where the chat template rewrites earlier turns; every other row has one.

    Args:
        path: file of the rows, for messages; None: `data.path`.

    Raises:
        DataError: a row is no demonstration, has no tokens to train on, or a sample with more than `max_tokens` while
            `data.overlong_prompts` is `error` (the message names file:line); or no row is left.
    """
    file = Path(path or config.file)
    template = PromptTemplate(config, tokenizer, config.template_date)
    reader, examples = DemonstrationReader(config, template), ExampleTokenizer(template)
    overlong = OverlongFilter(file, config.overlong_prompts, max_tokens, "demonstration", "the context length")
    explicit = ExplicitFields(config.fields, "data")
    num_rows = num_samples = 0
    for batch in track(batch_rows(rows), f"tokenizing {file.name}"):
        for row, of_row in zip(batch, examples.tokenize([(row, reader.read(row)) for row in batch]), strict=True):
            explicit.see(row)
            if overlong.keep(row, max(len(tokens.ids) for tokens in of_row)):
                yield [make_trajectory(row, tokens, group_id=i) for i, tokens in enumerate(of_row, num_samples)]
                num_rows += 1
                num_samples += len(of_row)
    explicit.require_found(file)
    overlong.report_dropped(num_kept=num_rows)
    if num_samples > num_rows:
        reason = "the chat template rewrites earlier turns"
        logger.warning("%s: %d samples of %d rows, because %s", file, num_samples, num_rows, reason)


class SampleTokens(NamedTuple):
    """T tokens of a sample."""

    ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T]: True for the tokens to train on."""


def make_trajectory(row: Row, tokens: SampleTokens, *, group_id: int) -> Trajectory:
    """Return a trajectory whose tokens to train on count as sampled by the policy."""
    return Trajectory(
        prompt_id=row.prompt_id,
        group_id=group_id,
        token_ids=tokens.ids,
        loss_mask=tokens.loss_mask,
        logprobs=np.zeros(len(tokens.ids), dtype=np.float32),
        policy_versions=np.full(len(tokens.ids), -1, dtype=np.int32),
    )


class TextExample(NamedTuple):
    """A prompt as it is rendered, and the text of a response to it."""

    prompt: str
    response: str
    fields: tuple[str, str]
    """What holds prompt and response, for messages."""


class ExampleTokenizer:
    """Tokenizes texts and conversations.

    Prompt and response of a text are tokenized separately, so that the prompt's tokens are those that generation starts
    from; then follows eos, unless the response ends in eos.
    """

    def __init__(self, template: PromptTemplate) -> None:
        self._template = template

    @cached_property
    def _conversations(self) -> ConversationTokenizer:
        return ConversationTokenizer(self._template)

    def tokenize(self, examples: Sequence[tuple[Row, TextExample | Conversation]]) -> list[list[SampleTokens]]:
        """Return the samples of each example, at least one.

        Raises:
            DataError: a prompt or a response has no tokens, or one that the model lacks; a conversation cannot be
                rendered as generation would give it. The message names file:line.
        """
        texts = [(row, example) for row, example in examples if isinstance(example, TextExample)]
        conversations = [(row, example) for row, example in examples if isinstance(example, Conversation)]
        of_texts = iter(self._tokenize_texts(texts) if texts else ())
        of_conversations = iter(self._conversations.samples(conversations) if conversations else ())
        return [
            [next(of_texts)]
            if isinstance(example, TextExample)
            else [SampleTokens(sample.token_ids, sample.loss_mask) for sample in next(of_conversations)]
            for _, example in examples
        ]

    def _tokenize_texts(self, texts: Sequence[tuple[Row, TextExample]]) -> list[SampleTokens]:
        rows = [row for row, _ in texts]
        prompts = self._template.tokenize([text.prompt for _, text in texts], rows)
        responses = self._template.tokenize_responses([text.response for _, text in texts], rows)
        for (row, text), *both in zip(texts, prompts, responses, strict=True):
            for ids, field in zip(both, text.fields, strict=True):
                if not ids:
                    raise DataError(f"{row.where}: {field} holds no tokens")
        return [
            SampleTokens(np.array(prompt + response, np.int32), np.arange(len(prompt + response)) >= len(prompt))
            for prompt, response in zip(prompts, responses, strict=True)
        ]


class DemonstrationReader:
    """Reads rows as texts or conversations.

    The first of these shapes that a row has is used; the names are those of `data.fields`, or of the format:

    | fields                                          | trained on                                |
    |-------------------------------------------------|-------------------------------------------|
    | `prompt`, `response`                            | the response                              |
    | `messages`, or ShareGPT's `conversations`       | turns of the assistant                    |
    | `prompt`, `completion`                          | the completion, turns of the assistant    |
    | `instruction`, `input`, `output`, ... (Alpaca)  | the output, and the answers of `history`  |
    | `prompt`: messages that end with the assistant  | turns of the assistant                    |
    """

    def __init__(self, config: DataConfig, template: PromptTemplate) -> None:
        self._fields, self._template = config.fields, template

    def read(self, row: Row) -> TextExample | Conversation:
        """Return the demonstration of a row.

        Raises:
            DataError: it has none; the message names file:line.
        """
        refuse_media(row)
        names, has = self._fields, row.fields
        if row.has(names.response):
            return self._text(row, names.response, "data.fields.response")
        for field in (names.messages, "conversations"):
            found = row.find(field)
            if found is not None:
                return self.conversation(row, self._template.messages(row, found, field, "data.fields.messages"))
        if "completion" in has:
            if isinstance(has["completion"], str):
                return self._text(row, "completion", "data.fields.response")
            return self._completion(row)
        if INSTRUCTION in has and INSTRUCTION_OUTPUT in has:
            return self._alpaca(row)
        prompt = row.find(names.prompt)
        if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict) and "assistant" in prompt[-1].values():
            return self.conversation(row, self._template.messages(row, prompt, names.prompt, "data.fields.prompt"))
        found = ", ".join(repr(name) for name in has) or "no fields"
        raise DataError(
            f"{row.where}: a demonstration needs field {names.response!r} (data.fields.response), the text to train "
            f"on, or a conversation in field {names.messages!r} (data.fields.messages); the row has {found}"
        )

    def _text(self, row: Row, field: str, key: str) -> TextExample:
        response = row.response(field, key)
        prompt = f"field {self._fields.prompt!r} (data.fields.prompt)"
        rendered = self._template.render(row)
        return TextExample(rendered, response, (prompt, f"field {field!r} ({key})"))

    def conversation(self, row: Row, messages: Messages, start: int = 0) -> Conversation:
        """Return a conversation of a row in which turns of the assistant from message `start` on are trained on.

        Raises:
            DataError: there are none.
        """
        system = row.fields.get("system")
        if isinstance(system, str) and system and messages[0]["role"] != "system":
            messages, start = [{"role": "system", "content": system}, *messages], start + 1
        all_messages = self._template.with_system_prompt(row, messages)
        try:
            trained = find_trained(all_messages, start + len(all_messages) - len(messages))
        except MessageError as e:
            raise DataError(f"{row.where}: the conversation {e}") from e
        tools = self._template.tools(row)
        if not trained:
            raise DataError(f"{row.where}: the conversation has no turn of the assistant to train on")
        for i in trained:
            if not has_text(all_messages[i]):
                raise DataError(f"{row.where}: message {i + 1}, of the assistant, has no text to train on")
        return Conversation(messages=without_weights(all_messages), trained=trained, tools=tools)

    def _completion(self, row: Row) -> Conversation:
        prompt = self._template.prompt_messages(row)
        completion = self._template.messages(row, row.fields["completion"], "completion", "data.fields.response")
        return self.conversation(row, [*prompt, *completion], len(prompt))

    def _alpaca(self, row: Row) -> TextExample | Conversation:
        question = read_instruction(row)
        output = row.response(INSTRUCTION_OUTPUT, "data.fields.response")
        fill = partial(self._template.reader.fill, row)
        history = row.fields.get("history") or []
        if not self._template.has_chat and not history and not row.fields.get("system"):
            fields = ("field 'instruction'", "field 'output'")
            return TextExample(fill(question), output, fields)
        self._template.require_chat(row, "an instruction with history or system")
        messages: list[dict[str, Any]] = []
        for said in chain(history, [(question, output)]):
            if not isinstance(said, list | tuple) or [type(text) for text in said] != [str, str]:
                raise DataError(f"{row.where}: field 'history' needs pairs of a question and an answer, got {said!r}")
            asked = fill(said[0]) if said[0] is question or self._template.reader.needs_prompt else said[0]
            messages += [*as_question(asked), {"role": "assistant", "content": said[1]}]
        return self.conversation(row, messages)
