"""Report what the data files of a configuration hold, for `megarl data` and `megarl check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, override

import numpy as np

from megarl.config.data import PromptFormat, Source
from megarl.config.reward import JudgeRewardConfig, MathRewardConfig, NumericRewardConfig
from megarl.config.run import PreferenceConfig, RmConfig, RunConfig, StageConfig
from megarl.controller.preflight.model_checks import find_token_limit, will_write_model
from megarl.data.account import (
    SAMPLE_ROWS,
    EqualRows,
    FileAccount,
    LeftOut,
    Lengths,
    RowContent,
    Segment,
    measure_lengths,
    split_by_mask,
)
from megarl.data.assistant_turns import Conversation
from megarl.data.chat_template import PromptTemplate
from megarl.data.demonstrations import DemonstrationReader, ExampleTokenizer, SampleTokens, TextExample
from megarl.data.preference_pairs import PairReader, read_margin, read_safety
from megarl.data.prompts import batch_rows
from megarl.data.rows import (
    ANSWER_FIELDS,
    DEFAULT_FIELDS,
    MEDIA,
    PROMPT_FIELDS,
    ExplicitFields,
    PromptReader,
    Row,
    read_rows,
    track,
)
from megarl.errors import DataError
from megarl.megatron.families.load_architecture import read_hf_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.model_files.json_object import JsonMapping


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


NO_MODEL = "none"
"""`model.path` where no model is given."""

MEANINGFUL = ("image", "video", "audio", "tools", "input", "system", "history")
"""Columns that other trainers render; a notice names those that are not. Images and so on that are no text are refused.
"""


FORMATS = {
    "verl": {"prompt", "reward_model"},
    "slime": {"prompt", "label"},
    "NeMo-Gym": {"responses_create_params"},
    "TRL": {"prompt", "completion"},
    "verifiers": {"question", "info"},
    "question and answer": {"question", "answer"},
    "OpenAI messages": {"messages"},
    "ShareGPT": {"conversations"},
    "Alpaca": {"instruction"},
    "HelpSteer3": {"overall_preference"},
    "NeMo-RL preferences": {"completions", "context"},
}
"""Format -> columns that are read of its rows; the first one is named."""

PROMPT_COLUMNS = tuple(name for name in PROMPT_FIELDS if "." not in name)
ANSWER_COLUMNS = tuple(name for name in ANSWER_FIELDS if "." not in name)
SAMPLE_COLUMNS = ("response", "messages", "conversations", "completion")
"""Columns of which one is read, for a prompt, an answer and a demonstration: the first that a row has."""

AnswerTerms = dict[str, NumericRewardConfig | MathRewardConfig | JudgeRewardConfig]


def find_answer_terms(config: RunConfig, source: Source) -> AnswerTerms:
    """Return the reward terms of a source that need a reference answer, by their names."""
    names = source.config.reward_terms if source.config.reward_terms is not None else config.reward.rules
    terms = {name: config.reward.terms[name] for name in names}
    return {
        name: term
        for name, term in terms.items()
        if isinstance(term, NumericRewardConfig | MathRewardConfig)
        or (isinstance(term, JudgeRewardConfig) and "{answer}" in term.rubric)
    }


TRAINED_COLUMNS = ("conversations", "completion", "completions", "output", "history", "response1", "response2")
"""Columns of known formats that are trained on, or have turns that are; others are named by `data.fields`."""


@dataclass(kw_only=True)
class FileReport:
    """What one file holds, and what its stage uses of it."""

    key: str
    """YAML key of the file's path."""
    path: str
    config: StageConfig
    source: Source
    account: FileAccount
    reader: PlainReader
    explicit: ExplicitFields
    num_overlong: int = 0
    """Usable rows that `data.overlong_prompts: drop` leaves out; counted where all rows are tokenized."""
    training_prompts: dict[str, EqualRows] = field(default_factory=dict)
    """Of a held-out file: path of a training file -> rows whose prompt is in it."""
    lengths: Lengths | None = None
    refused_in_sample: dict[str, LeftOut] = field(default_factory=dict)
    """Reason -> rows of the sample that the chat template or the tokenizer refuses."""
    shown: dict[str, dict[str, list[Segment]]] = field(default_factory=dict)
    """Place of a row -> name -> text."""

    @property
    def used(self) -> set[str]:
        """Columns that are read of a row, without those that need to be empty."""
        return (self.account.used | self.account.answers) - {*MEDIA}

    @property
    def uses(self) -> dict[str, str]:
        """Column -> what it is used for."""
        return {name: self._use(name) for name in self.account.columns}

    def _use(self, column: str) -> str:
        fields, is_run = self.source.config.fields, isinstance(self.config, RunConfig)
        if column in MEDIA and column not in MEANINGFUL:
            return "has to be empty"
        if column not in self.used:
            return "passed to rewards" if is_run else "ignored"
        if column not in self.account.used:
            return "answer"
        if column == "overall_preference":
            return "order of the answers"
        for key in ("tools", "margin", "chosen_safe", "rejected_safe"):
            if column == getattr(fields, key).partition(".")[0]:
                return key.replace("_", " ")
        trained = {fields.response, fields.messages, fields.chosen, fields.rejected, *TRAINED_COLUMNS}
        return "rendered" if is_run or column not in trained else "trained on"

    @property
    def kind(self) -> str:
        """What the rows are."""
        if isinstance(self.config, RunConfig):
            return "prompts"
        return "pairs" if isinstance(self.config, PreferenceConfig) else "demonstrations"

    @property
    def format(self) -> str:
        """The format of the usable rows: texts, messages, or some of both."""
        account = self.account
        num_messages = account.num_usable - account.num_texts
        name = next((f" ({name})" for name, columns in FORMATS.items() if columns <= self.used), "")
        if not account.num_usable:
            return f"{self.kind}{name}, none of which can be used"
        if not num_messages or not account.num_texts:
            return f"{self.kind} of {'messages' if num_messages else 'texts'}{name}"
        return f"{self.kind}{name}, {account.num_texts:,} of texts and {num_messages:,} of messages"

    @property
    def reason(self) -> str:
        """Why the rows are of this format: the columns that are read, with their types."""
        read = [f"{name!r} ({self.types(name)})" for name, use in self.uses.items() if name in self.used]
        return f"rows have {', '.join(read)}" if read else "no row could be read"

    def types(self, column: str) -> str:
        """Return the types of a column's values; `-` if all are null."""
        counts = self.account.columns[column]
        return ", ".join(name for name, _ in counts.most_common()) or "-"

    def as_json(self) -> dict[str, Any]:
        """Return the report as an object of JSON."""
        account = self.account
        return {
            "key": self.key,
            "path": self.path,
            "format": self.format,
            "reason": self.reason,
            "num_rows": account.num_rows,
            "num_usable": account.num_usable,
            "num_answers": account.num_answers if isinstance(self.config, RunConfig) else None,
            "columns": {
                name: {"use": use, "num_rows": account.columns[name].total(), "types": dict(account.columns[name])}
                for name, use in self.uses.items()
            },
            "repeated_rows": asdict(account.rows.find_repeats()),
            "repeated_prompts": asdict(account.prompts.find_repeats()),
            "training_prompts": {path: asdict(shared) for path, shared in self.training_prompts.items()},
            "left_out": {reason: asdict(rows) for reason, rows in account.left_out.items()},
            "lengths": self.lengths and asdict(self.lengths),
            "refused_in_sample": {reason: asdict(rows) for reason, rows in self.refused_in_sample.items()},
            "shown": {
                place: {name: [segment._asdict() for segment in segments] for name, segments in texts.items()}
                for place, texts in self.shown.items()
            },
            "notices": self.notices(),
            "problems": self.problems(),
        }

    def facts(self, *, only_problems: bool = False) -> list[str]:
        """Return a sentence for each fact about equal rows, answers and rows left out, and about lengths.

        Args:
            only_problems: leave out what counts no rows.
        """
        account, facts = self.account, []
        rows, prompts = account.rows.find_repeats(), account.prompts.find_repeats()
        for repeated, what in ((rows, "row"), (prompts, "prompt")):
            if repeated.count or not only_problems:
                shares = f"{repeated.count:,} of {account.num_rows:,} rows"
                facts.append(f"{shares} repeat an earlier {what}{_example(repeated)}")
        for path, shared in self.training_prompts.items():
            if shared.count or not only_problems:
                shares = f"{shared.count:,} of {account.num_usable:,} prompts"
                facts.append(f"{shares} are in the training rows of {path}{_example(shared)}")
        if isinstance(self.config, RunConfig) and (account.num_answers < account.num_usable or not only_problems):
            columns = " or ".join(map(repr, sorted(account.answers))) or repr(self.source.config.fields.answer)
            facts.append(f"{account.num_answers:,} of {account.num_usable:,} rows have an answer in {columns}")
        for reason, left in account.left_out.items():
            facts.append(f"{left.count:,} of {account.num_rows:,} rows cannot be used: {reason} (first {left.example})")
        if self.num_overlong:
            facts.append(f"{self.num_overlong:,} of {account.num_usable:,} rows are dropped, because they are too long")
        if self.lengths is not None:
            facts.append(_describe_lengths(self.lengths, account.num_usable))
        for reason, left in self.refused_in_sample.items():
            facts.append(f"{left.count:,} rows of the sample cannot be used: {reason} (first {left.example})")
        return facts

    def notices(self) -> list[str]:
        """Return a sentence for each column that looks like part of the prompt and is not, and for missing answers."""
        account, found = self.account, []
        for name, use in self.uses.items():
            if name in MEANINGFUL and name not in self.used and account.columns[name]:
                found.append(
                    f"column {name!r}, which {account.columns[name].total():,} rows have, is not rendered ({use})"
                )
        found += self._find_rivals()
        if account.num_usable and self._has_template and not self.reader.has_filled_template:
            found.append(
                f"{self.source.key}.prompt_template is applied to no row: it wraps prompts that are texts, and these "
                "are messages"
            )
        terms = find_answer_terms(self.config, self.source) if isinstance(self.config, RunConfig) else {}
        if terms and not account.num_answers and account.num_usable:
            term, section = next(iter(terms.items()))
            field, key = self.source.config.fields.answer, f"{self.source.key}.fields.answer"
            found.append(
                f"no row has an answer in {field!r} ({key}), which "
                f"reward.terms.{term} ({section.type}) needs; the columns are {', '.join(account.columns)}"
            )
        return found

    @property
    def _has_template(self) -> bool:
        return self.source.config.prompt_template != PromptFormat().prompt_template

    def problems(self) -> list[str]:
        """Return a sentence for each field that the configuration names and that no row has."""
        try:
            self.explicit.require_found(Path(self.path))
        except DataError as e:
            return [str(e)]
        return []

    def _find_rivals(self) -> list[str]:
        """Return a sentence for each column from which another format would read what is read from one of this."""
        fields = self.source.config.fields
        kinds = [(PROMPT_COLUMNS, ("prompt", "messages")), (ANSWER_COLUMNS, ("answer",))]
        if not isinstance(self.config, RunConfig):
            kinds = [(SAMPLE_COLUMNS, ("response", "messages"))]
        found = list[str]()
        for columns, keys in kinds:
            read = next((name for name in columns if name in self.used), None)
            if read is None or self.account.columns[read].total() < self.account.num_rows:
                continue  # rows without this column may be read from another one
            if any(getattr(fields, key) != getattr(DEFAULT_FIELDS, key) for key in keys):
                continue  # the user has chosen a column
            rivals = [name for name in columns if name not in self.used and self.account.columns.get(name)]
            found += [f"column {name!r} is not read, because rows have {read!r}; see data.fields" for name in rivals]
        return found

    def lines(self) -> list[str]:
        """Return the report in a few lines, for `megarl check`."""
        by_use: dict[str, list[str]] = {}
        for name, use in self.uses.items():
            by_use.setdefault(use, []).append(name)
        columns = "; ".join(f"{use}: {', '.join(names)}" for use, names in by_use.items())
        head = f"{self.key}: {self.account.num_rows:,} rows, {self.format}; {columns}"
        return [head, *(f"{self.key}: {fact}" for fact in (*self.facts(only_problems=True), *self.notices()))]


def _example(rows: EqualRows) -> str:
    return "" if rows.example is None else f" (first {' as '.join(rows.example)})"


def _describe_lengths(lengths: Lengths, num_rows: int) -> str:
    whole = "all" if lengths.num_rows == num_rows else f"{lengths.num_rows:,} of {num_rows:,}"
    quantiles = ", ".join(f"{name} {value:,}" for name, value in lengths.quantiles.items())
    sample = "" if whole == "all" else ", drawn at random"
    return (
        f"tokens of {whole} rows{sample}: {quantiles}; {lengths.num_longer:,} are above the limit of {lengths.limit:,}"
    )


def report_files(config: StageConfig, *, num_shown: int, sample_rows: int = SAMPLE_ROWS) -> list[FileReport]:
    """Read all files of a configuration and return their reports: each training file, then each held-out file.

    Args:
        num_shown: number of rows of a file to render.
        sample_rows: number of rows of a file whose lengths are measured.

    Raises:
        MegarlError: a file or the model's folder cannot be read.
    """
    tokenizer, hf_config = _load_model(config)
    reports = list[FileReport]()
    for name in ("path", "eval_path"):
        for source in config.data.resolved_sources:
            path = getattr(source.config, name)
            if path is None:
                continue
            report = start_report(config, source, name, tokenizer, num_shown=num_shown, sample_rows=sample_rows)
            for rows in track(batch_rows(read_rows(path)), f"reading {Path(path).name}"):
                for row in rows:
                    report.account.add(row)
                    report.explicit.see(row)
            _add_texts(report, tokenizer, hf_config)
            reports.append(report)
    find_shared_prompts(reports)
    return reports


def start_report(
    config: StageConfig,
    source: Source,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    num_shown: int = 0,
    sample_rows: int = 0,
) -> FileReport:
    """Return a report whose account has no rows yet.

    Args:
        name: key of the file in the source, `path` or `eval_path`.
    """
    has_chat = tokenizer is None or TokenReader(config, source, tokenizer).has_chat
    reader, path = PlainReader(config, source, has_chat=has_chat), getattr(source.config, name)
    account = FileAccount(path, reader.read, reader.has_answer, num_first=num_shown, sample_rows=sample_rows)
    return FileReport(
        key=f"{source.key}.{name}",
        path=path,
        config=config,
        source=source,
        account=account,
        reader=reader,
        explicit=ExplicitFields(source.config.fields, source.key),
    )


def find_shared_prompts(reports: Sequence[FileReport]) -> None:
    """Compare the prompts of each held-out file with those of each training file."""
    training = [report for report in reports if report.key.endswith(".path")]
    for report in reports:
        if report.key.endswith(".eval_path"):
            for other in training:
                report.training_prompts[other.path] = report.account.prompts.find_shared(other.account.prompts)


def _load_model(config: StageConfig) -> tuple[PreTrainedTokenizerBase | None, JsonMapping]:
    """Return the tokenizer and config.json of the model; None and nothing where no model is given, or none yet."""
    from megarl.data.tokenizer import load_tokenizer

    if config.model.path == NO_MODEL or will_write_model(config):
        return None, {}
    folder = Path(config.model.path)
    return load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code), read_hf_config(folder)


def _add_texts(report: FileReport, tokenizer: PreTrainedTokenizerBase | None, hf_config: JsonMapping) -> None:
    """Render the first rows, and measure the lengths of the sample if there is a tokenizer."""
    account = report.account
    if tokenizer is None:
        reader = PlainReader(report.config, report.source)
        report.shown = {row.where: reader.show(row) for row in account.first}
        return
    tokens = TokenReader(report.config, report.source, tokenizer)
    measure_sample(report, tokens, find_token_limit(report.config, hf_config, report.source))
    for row in account.first:
        try:
            report.shown[row.where] = tokens.show(tokens.tokenize(row))
        except DataError:
            continue  # counted above, or named by the error of the run


def measure_sample(report: FileReport, tokens: TokenReader, limit: int) -> None:
    """Measure the lengths in tokens of the sample of a file's rows; count those that cannot be tokenized by reason.

    Args:
        limit: the most tokens that a row may have.
    """
    lengths = list[int]()
    for row in report.account.sample:
        try:
            lengths.append(max(len(each.ids) for each in tokens.tokenize(row).values()))
        except DataError as e:
            reason = str(e).removeprefix(f"{row.where}: ")
            report.refused_in_sample.setdefault(reason, LeftOut(count=0, example=row.where)).count += 1
    if lengths:
        report.lengths = measure_lengths(lengths, limit)
