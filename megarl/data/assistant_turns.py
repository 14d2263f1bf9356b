r"""Find the tokens that the assistant writes in a conversation, as a chat template renders it.

A turn is rendered twice: the messages before it with the head of the assistant's turn, from which generation starts,
and the messages up to it. What the second text adds is what the policy would generate: the text of the message and the
token that ends the turn.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n          prompt
    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n
                                                          reply: Yo<|im_end|>

Turns whose tokens continue those of the turn before share one sample. Where they do not, as with a template that
removes thoughts from earlier turns, the conversation becomes several samples, each ending with a turn as generated.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.data.chat_template import PromptTemplate, read_end_ids
from megarl.data.conversations import has_text
from megarl.data.rows import Row
from megarl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

STAND_IN = "\ue000reply\ue001"
"""Text of a message in whose place a reply may be."""

END_OF_THOUGHT = "</think>"

GENERATION_MARK = re.compile(r"{%-?\s*generation\s*-?%}")

CHUNK_CHARACTERS = 4_000_000
"""Characters of rendered turns that are tokenized per call, in parallel by the tokenizer's threads."""

MAX_OPENED = 64
"""Maximum number of characters of a reply that the head of the assistant's turn contains already, as `<think>`."""


class Turn(NamedTuple):
    """One rendered turn of the assistant."""

    message: int
    """Index of the message."""
    prompt: str
    """Text from which generation starts."""
    reply: str
    """Text to generate, with the token that ends the turn where the template writes one."""


class TurnTokens(NamedTuple):
    """Tokens of a rendered turn."""

    prompt_length: int
    """Number of tokens of the prompt."""
    ids: NDArray[np.int32]
    """[T]: prompt and reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """T tokens of a conversation up to a turn of the assistant."""

    message: int
    """Index of the message that ends the sample."""

    token_ids: NDArray[np.int32]
    """[T]"""

    loss_mask: NDArray[np.bool_]
    """[T]: True for the tokens of trained turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages, and which of them are trained on."""

    messages: Sequence[Message]
    """As chat templates take them; the content of each is a text."""

    trained: Sequence[int]
    """Indices of the assistant's messages to train on, ascending; at least one."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Definitions of tools, as chat templates take them."""


class ConversationTokenizer:
    """Turns conversations into tokens and loss masks with the chat template of a tokenizer."""

    def __init__(self, template: PromptTemplate) -> None:
        self._template = template
        tokenizer = template.tokenizer
        self._stop_ids = read_end_ids(tokenizer)
        self._stops = [text for each in sorted(self._stop_ids) if (text := _special_text(tokenizer, each)) is not None]
        self._specials = [*tokenizer.get_added_vocab()]
        self._piece = _find_pieces(tokenizer)
        self._written_roles = {"user", "assistant"}
        self._is_endless = False
        self._has_marks = tokenizer.is_fast and GENERATION_MARK.search(template.source) is not None

    def samples(self, conversations: Iterable[tuple[Row, Conversation]]) -> Iterator[list[Sample]]:
        """Yield the samples of each conversation, at least one.

        Raises:
            DataError: a turn cannot be rendered as generation would give it, or has a token that the model lacks; the
                message names file:line.
        """
        chunk, size = list[tuple[Row, Conversation, list[Turn]]](), 0
        for row, given in conversations:
            conversation = replace(given, messages=[self._without_end(message) for message in given.messages])
            turns = self._turns(row, conversation)
            chunk.append((row, conversation, turns))
            size += sum(2 * len(turn.prompt) + len(turn.reply) for turn in turns)
            if size >= CHUNK_CHARACTERS:
                yield from self._tokenize(chunk)
                chunk, size = [], 0
        yield from self._tokenize(chunk)

    def _without_end(self, message: Message) -> Message:
        """Return a message of the assistant without a stop token at its end, which the template writes."""
        text: str = message["content"]
        end = next((stop for stop in self._stops if text.endswith(stop)), None)
        return message if end is None or message["role"] != "assistant" else {**message, "content": text[: -len(end)]}

    def _turns(self, row: Row, conversation: Conversation) -> list[Turn]:
        def render(messages: Sequence[Message], add_generation_prompt: bool) -> str:
            return self._template.render_messages(
                row, messages, conversation.tools, add_generation_prompt=add_generation_prompt
            )

        renderer, messages = TurnRenderer(render, self._stops, self._specials), conversation.messages
        try:
            turns = [renderer.turn(messages, i) for i in conversation.trained]
            for i, message in enumerate(messages[: turns[-1].message]):
                if message["role"] not in self._written_roles and message["content"].strip():
                    renderer.require_written(messages, i, next(turn for turn in turns if turn.message > i))
                    self._written_roles.add(message["role"])
        except TurnError as e:
            raise DataError(f"{row.where}: {e}") from e
        return turns

    def _tokenize(self, chunk: Sequence[tuple[Row, Conversation, list[Turn]]]) -> Iterator[list[Sample]]:
        owners = [row for row, _, turns in chunk for _ in turns]
        tokens = iter(self._encode([turn for _, _, turns in chunk for turn in turns], owners))
        for row, conversation, turns in chunk:
            try:
                marks = partial(self._marks, conversation) if self._has_marks else None
                samples = make_samples(turns, [*islice(tokens, len(turns))], marks)
            except TurnError as e:
                raise DataError(f"{row.where}: {e}") from e
            self._warn_without_end(row, samples[-1])
            yield samples

    def _warn_without_end(self, row: Row, sample: Sample) -> None:
        """Report the first sample whose last token does not end generation."""
        last = sample.token_ids[-1].item()
        if not self._is_endless and last not in self._stop_ids:
            self._is_endless = True
            stops, end = " or ".join(map(repr, self._stops)), self._template.tokenizer.decode([last])
            logger.warning(
                "%s: the chat template ends the turn with %r, but generation ends only at %s: a model trained on such "
                "turns does not learn to end them",
                row.where,
                end,
                stops,
            )

    def _encode(self, turns: Sequence[Turn], owners: Sequence[Row]) -> list[TurnTokens]:
        """Return the tokens of turns; those of a prompt and its reply begin with those of the prompt."""
        prompts = self._arrays([turn.prompt for turn in turns], owners)
        wholes = self._arrays([turn.prompt + turn.reply for turn in turns], owners)
        # A token across the end of the prompt cannot be generated: the reply is tokenized by itself.
        merged = [i for i, prompt in enumerate(prompts) if not _is_prefix(prompt, wholes[i])]
        replies = self._arrays([turns[i].reply for i in merged], [owners[i] for i in merged])
        for i, reply in zip(merged, replies, strict=True):
            wholes[i] = np.concatenate([prompts[i], reply])
        return [TurnTokens(len(prompt), whole) for prompt, whole in zip(prompts, wholes, strict=True)]

    def _arrays(self, texts: Sequence[str], owners: Sequence[Row]) -> list[NDArray[np.int32]]:
        """Return the tokens of texts. Pieces that several have are tokenized once, as each text begins as others do."""
        cut = self._piece
        split = [[text] if cut is None else [piece for piece in cut.split(text) if piece] for text in texts]
        first = {piece: row for pieces, row in zip(split, owners, strict=True) for piece in pieces}
        encoded = self._template.encode_rows([*first], [*first.values()]) if first else []
        ids = {piece: np.array(of, np.int32) for piece, of in zip(first, encoded, strict=True)}
        return [np.concatenate([np.empty(0, np.int32), *(ids[piece] for piece in pieces)]) for pieces in split]

    def _marks(self, conversation: Conversation, last: int) -> NDArray[np.int32]:
        marked = self._template.encode_marked(conversation.messages[: last + 1], conversation.tools)
        return np.array(marked, np.int32)


def _special_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str | None:
    """Return the text of a token that is not made of its characters; None for other tokens."""
    added = tokenizer.added_tokens_decoder.get(token)
    return None if added is None else added.content


def _find_pieces(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern that cuts texts before special tokens; None if that changes the tokens of a text."""
    specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    if not specials:
        return None
    pattern = re.compile(f"(?={'|'.join(re.escape(text) for text in specials)})")
    text = "\na ".join(["a", *specials, "a"])
    whole, *pieces = tokenizer([text, *filter(None, pattern.split(text))], add_special_tokens=False)["input_ids"]
    return pattern if list(chain.from_iterable(pieces)) == list(whole) else None


class TurnError(Exception):
    """A turn cannot be rendered as generation would give it."""


class TurnRenderer:
    """Renders the assistant's turns of conversations with the chat template of a tokenizer."""

    def __init__(
        self, render: Callable[[Sequence[Message], bool], str], stops: Collection[str], special_tokens: Collection[str]
    ) -> None:
        """Args:
        render: returns the text of messages; with True, also the head of the assistant's turn.
        stops: texts of the tokens at which generation ends.
        special_tokens: texts of the tokens that are not made of their characters.
        """
        self._render, self._stops, self._special_tokens = render, stops, special_tokens

    def turn(self, messages: Sequence[Message], index: int) -> Turn:
        """Return the rendered turn of a message of the assistant.

        Raises:
            TurnError: the message has no text and no calls, a token in its text would end it early, or the template
                renders it in a way that generation could not give.
        """
        message, before = messages[index], messages[:index]
        name = f"message {index + 1}"
        if not has_text(message):
            raise TurnError(f"{name}, of the assistant, has no text to train on")
        if index == 0:
            raise TurnError(f"{name} is of the assistant; it needs a message before it that it replies to")
        for text in _texts(message):
            if (stop := self._first(text, self._stops)) is not None:
                raise TurnError(f"{name}, of the assistant, has {stop!r} in its text, at which generation would end")
        prompt, shown = self._render(before, True), self._render([*before, message], False)
        reply = shown.removeprefix(prompt)
        self._require_text(message, reply, name)
        if shown.startswith(prompt) and (END_OF_THOUGHT in reply or END_OF_THOUGHT not in message["content"]):
            reply = self._cut(reply, before)
        else:
            reply = self._own_text(message, prompt, shown, name) + self._end_in(self._tail(before))
        if self._first(reply, self._stops) is None:
            reply += self._next_stop(message, before, prompt + reply)
        return Turn(index, prompt, reply)

    def require_written(self, messages: Sequence[Message], index: int, turn: Turn) -> None:
        """Raise a `TurnError` if the prompt of a later turn is the same without a message."""
        others = [*messages[:index], *messages[index + 1 : turn.message]]
        try:
            is_left_out = bool(others) and self._render(others, True) == turn.prompt
        except DataError:  # the template needs the message
            return
        if is_left_out:
            role = messages[index]["role"]
            raise TurnError(f"message {index + 1}: the chat template leaves out messages of the role {role}")

    @staticmethod
    def _require_text(message: Message, reply: str, name: str) -> None:
        """Raise a `TurnError` if the template leaves out what a message has."""
        thought = message.get("reasoning_content")
        if isinstance(thought, str) and thought.strip() not in reply:
            raise TurnError(f"{name}: the chat template leaves out its reasoning_content")
        if message["content"].rpartition(END_OF_THOUGHT)[2].strip() not in reply:
            raise TurnError(f"{name}: the chat template leaves out or changes its text")
        for call in message.get("tool_calls", ()):
            if str(call["function"].get("name")) not in reply:
                raise TurnError(f"{name}: the chat template leaves out its calls of tools")

    def _own_text(self, message: Message, prompt: str, shown: str, name: str) -> str:
        """Return the message's own text, less what the head of the turn has of it, where the template rewrites it."""
        text: str = message["content"]
        if shown.startswith(prompt):
            return text
        for size in range(min(MAX_OPENED, len(prompt)), 0, -1):
            opened = prompt[-size:]
            if shown.startswith(prompt[:-size]) and not message.get("tool_calls"):
                if text.startswith(opened):
                    return text.removeprefix(opened)
                if opened.strip() and text.startswith(opened.rstrip()):
                    return text.removeprefix(opened.rstrip()).lstrip()
        raise TurnError(
            f"{name}, of the assistant, does not continue the prompt from which generation starts: the chat template "
            f"ends the prompt with {prompt[-40:]!r}, and writes the conversation as {shown[-80:]!r}"
        )

    def _cut(self, reply: str, before: Sequence[Message]) -> str:
        """Return a reply up to the token that ends the turn; what the template writes after it is removed."""
        if (stop := self._first(reply, self._stops)) is not None:
            return reply[: reply.index(stop) + len(stop)]
        tail = self._tail(before)
        return reply.removesuffix(tail) + self._end_in(tail) if reply.endswith(tail) else reply

    def _next_stop(self, message: Message, before: Sequence[Message], ended: str) -> str:
        """Return the token at which generation ends that the template writes with a next message; empty if it does not.

        Args:
            ended: text up to the end of the message.
        """
        following = {"role": "tool" if message.get("tool_calls") else "user", "content": "a"}
        stand_in = {"role": "assistant", "content": STAND_IN}
        try:
            text = self._render([*before, message, following], False)
            if text.startswith(ended):
                rest = text.removeprefix(ended)
            else:  # thoughts of the message are removed
                rest = self._render([*before, stand_in, following], False).partition(STAND_IN)[2]
        except DataError:  # the template takes no such message here
            return ""
        stop = self._first(rest, self._stops)
        return stop if stop is not None and rest.startswith(stop) else ""

    def _tail(self, before: Sequence[Message]) -> str:
        """Return what the template writes after the text of a turn."""
        return self._render([*before, {"role": "assistant", "content": STAND_IN}], False).rpartition(STAND_IN)[2]

    def _end_in(self, tail: str) -> str:
        """Return `tail` up to the token that ends the turn; empty if there is none."""
        end = self._first(tail, self._stops) or self._first(tail, self._special_tokens)
        return "" if end is None else tail[: tail.index(end) + len(end)]

    @staticmethod
    def _first(text: str, tokens: Collection[str]) -> str | None:
        """Return the token that comes first in the text; of several at one place the longest."""
        found = [(text.index(token), -len(token), token) for token in tokens if token in text]
        return min(found)[2] if found else None


def _texts(message: Message) -> list[str]:
    """Return all texts in a message."""
    found: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            for each in value.values():
                collect(each)
        elif isinstance(value, Sequence):
            for each in value:
                collect(each)

    collect(message)
    return found


def make_samples(
    turns: Sequence[Turn],
    tokens: Sequence[TurnTokens],
    marks: Callable[[int], NDArray[np.int32]] | None = None,
) -> list[Sample]:
    """Return the samples of a conversation, in the order of their last turns; each turn is trained on in one of them.

    Args:
        turns: at least one, in order.
        tokens: of each turn.
        marks: returns, for the index of a message, the tokens [2, T] of the conversation up to it: ids, and whether
            they are inside of the template's generation marks; None: it has none.

    Raises:
        TurnError: no turn is inside of marks.
    """
    rest, samples = list(range(len(turns))), list[Sample]()
    while rest:
        ids, last = tokens[rest[-1]].ids, turns[rest[-1]].message
        spans, others = list[tuple[int, int]](), list[int]()
        for i in rest:
            if not _is_prefix(tokens[i].ids, ids):
                others.append(i)
                continue
            spans.append((tokens[i].prompt_length, len(tokens[i].ids)))
        inside = np.ones(len(ids), np.bool_) if marks is None else _inside_marks(ids, marks(last))
        samples.append(Sample(message=last, token_ids=ids, loss_mask=_mask(spans, inside)))
        rest = others
    return samples[::-1]


def _mask(spans: Sequence[tuple[int, int]], inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the tokens of the spans that are inside of marks, and the last one of each span that has some.

    Raises:
        TurnError: there are none.
    """
    mask = np.zeros(len(inside), np.bool_)
    for start, end in spans:
        if inside[start:end].any():
            mask[start:end] = inside[start:end]
            mask[end - 1] = True
    if not mask.any():
        raise TurnError("the chat template has {% generation %} marks, but none around the text of the assistant")
    return mask


def _is_prefix(prefix: NDArray[np.int32], ids: NDArray[np.int32]) -> bool:
    return len(prefix) <= len(ids) and np.array_equal(prefix, ids[: len(prefix)])


def _inside_marks(ids: NDArray[np.int32], marked: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return which tokens are inside of generation marks, [T]; all, if the tokens of the marked text are others."""
    if not _is_prefix(ids, marked[0]):
        return np.ones(len(ids), np.bool_)
    return marked[1, : len(ids)].astype(np.bool_)
