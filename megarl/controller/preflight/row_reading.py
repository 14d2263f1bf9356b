"""Read rows as their stage does: without a tokenizer, for the account of a file, and with one, to show their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, override

import numpy as np

from megarl.config.data import PromptFormat, Source
from megarl.config.run import PreferenceConfig, RmConfig, RunConfig, StageConfig
from megarl.data.account import RowContent, Segment, split_by_mask
from megarl.data.assistant_turns import Conversation
from megarl.data.chat_template import PromptTemplate
from megarl.data.demonstrations import DemonstrationReader, ExampleTokenizer, SampleTokens, TextExample
from megarl.data.preference_pairs import PairReader, read_margin, read_safety
from megarl.data.prompt_rows import PromptReader
from megarl.data.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Example = TextExample | Conversation


class PlainTemplate(PromptTemplate):
    """Reads prompts as training does, and renders messages as lines `role: content`, without a tokenizer."""

    def __init__(self, config: PromptFormat, *, key: str, has_chat: bool, model: str) -> None:
        """`has_chat`: whether the tokenizer of `model` has a chat template; without one, messages are refused."""
        self.reader = PromptReader(config, key=key)
        self._config, self._key, self.has_chat, self._model = config, key, has_chat, model

    @property
    @override
    def _model_name(self) -> str:
        return self._model

    def render_messages(
        self, row: Row, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **_: object
    ) -> str:
        """Return one line per message, after one with the names of tools, if there are any."""
        names = ", ".join(str(tool["function"].get("name")) for tool in tools)
        return "\n".join([*([f"tools: {names}"] if tools else []), *map(_line, messages)])


def _line(message: Mapping[str, Any]) -> str:
    return f"{message['role']}: {message['content']}"


class PlainReader:
    """Reads the rows of a source as its stage does, up to the chat template."""

    def __init__(self, config: StageConfig, source: Source, *, has_chat: bool = True) -> None:
        """`has_chat`: as for `PlainTemplate`."""
        self._template = PlainTemplate(source.config, key=source.key, has_chat=has_chat, model=config.model.path)
        self._reader = _make_reader(config, self._template)
        self._fields = source.config.fields
        self._is_cost_model = isinstance(config, RmConfig) and config.rm.kind == "cost"

    @property
    def has_filled_template(self) -> bool:
        """Whether the prompt template was applied to any row."""
        return self._template.reader.has_filled

    def read(self, row: Row) -> RowContent | None:
        """Return the prompt of a row; None if the row is dropped because its answers are rated as equal.

        Raises:
            DataError: the row cannot be used; the message names file:line.
        """
        match self._reader:
            case None:
                field = self._template.reader.prompt_field(row)
                return RowContent(self._prompt(row), is_text=not isinstance(row.find(field), list))
            case DemonstrationReader():
                return _content(self._reader.read(row))
            case PairReader():
                pair = self._reader.read(row)
                read_margin(row, self._fields.margin)
                if self._is_cost_model:
                    read_safety(row, self._fields)
                return _content(pair[0]) if pair else None

    def _prompt(self, row: Row) -> str:
        template = self._template
        return template.render_messages(row, template.question(row), template.tools(row))

    def has_answer(self, row: Row) -> bool:
        """Return whether a row has a reference answer for rewards; demonstrations and pairs have none."""
        return self._reader is None and bool(self._template.reader.answers(row))

    def show(self, row: Row) -> dict[str, list[Segment]]:
        """Return the texts of a row that `read` accepts, by their names, with what is trained on."""
        match self._reader:
            case None:
                return {"prompt": [Segment(self._prompt(row), False)]}
            case DemonstrationReader():
                return {"sample": _segments(self._reader.read(row))}
            case PairReader():
                pair = self._reader.read(row)
                return dict(zip(("chosen", "rejected"), map(_segments, pair or ()), strict=False))


class TokenReader:
    """Reads and tokenizes the rows of a source as its stage does."""

    def __init__(self, config: StageConfig, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._template = PromptTemplate(source.config, tokenizer, source.day, key=source.key)
        self._reader = _make_reader(config, self._template)
        self._examples = ExampleTokenizer(self._template)

    @property
    def has_chat(self) -> bool:
        """Whether prompts are rendered by a chat template."""
        return self._template.has_chat

    def tokenize(self, row: Row) -> dict[str, SampleTokens]:
        """Return the tokens of a row by their names: `prompt`; `sample`, numbered if there are several; or of a pair.

        Raises:
            DataError: the row cannot be used; the message names file:line.
        """
        match self._reader:
            case None:
                (ids,) = self._template.tokenize([self._template.render(row)], [row])
                return {"prompt": SampleTokens(np.array(ids, np.int32), np.zeros(len(ids), np.bool_))}
            case DemonstrationReader():
                (samples,) = self._examples.tokenize([(row, self._reader.read(row))])
                names = ["sample"] if len(samples) == 1 else [f"sample {i}" for i in range(1, len(samples) + 1)]
                return dict(zip(names, samples, strict=True))
            case PairReader():
                pair = self._reader.read(row) or ()
                answers = self._examples.tokenize([(row, answer) for answer in pair])
                return {name: tokens for name, (tokens,) in zip(("chosen", "rejected"), answers, strict=False)}

    def show(self, tokens: Mapping[str, SampleTokens]) -> dict[str, list[Segment]]:
        """Return the texts of tokens, cut where the loss mask changes."""
        return {
            name: split_by_mask(self._tokenizer, each.ids.tolist(), each.loss_mask.tolist())
            for name, each in tokens.items()
        }


def _make_reader(config: StageConfig, template: PromptTemplate) -> DemonstrationReader | PairReader | None:
    """Return what reads the rows of a stage; None: they are prompts."""
    if isinstance(config, RunConfig):
        return None
    if isinstance(config, PreferenceConfig):
        return PairReader(config.data, template)
    return DemonstrationReader(config.data, template)


def _content(example: Example) -> RowContent:
    """Return the part before the first one that is trained on."""
    if isinstance(example, TextExample):
        return RowContent(example.prompt, is_text=True)
    before = example.messages[: min(example.trained)]
    return RowContent("\n".join(_line(message) for message in before), is_text=False)


def _segments(example: Example) -> list[Segment]:
    if isinstance(example, TextExample):
        return [Segment(example.prompt, False), Segment(example.response, True)]
    segments = list[Segment]()
    for i, message in enumerate(example.messages):
        segments.append(Segment(f"{message['role']}: ", False))
        segments.append(Segment(str(message["content"]), i in example.trained))
        segments.append(Segment("\n", False))
    return segments
