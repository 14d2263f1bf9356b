"""The section `data`: prompt, demonstration and preference files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megarl.config.rollout import EnvironmentConfig
from megarl.config.section import FilePath, Section

RESERVED_TEMPLATE_NAMES = (
    *("messages", "conversation", "conversations", "tools", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now", "raise_exception", "self"),
)
"""Names of variables and arguments of chat templates that megarl and transformers set."""


def describe_bad_template_kwargs(values: Mapping[str, Any]) -> str | None:
    """Return why `values` cannot be variables of a chat template; None: they can."""
    for name in values:
        if not name.isidentifier():
            return f"needs names of variables, got {name!r}"
        if name in RESERVED_TEMPLATE_NAMES:
            return f"{name} is set by megarl; it is no variable for a configuration or a request to choose"
        try:
            json.dumps(values[name], allow_nan=False)
        except (TypeError, ValueError):
            return f"{name} needs a value that JSON has, such as a text in quotes, got {values[name]!r}"
    return None


class EvalConfig(Section):
    """Evaluation on the held-out rows of `data.eval_path`, or of `data.sources.NAME.eval_path`."""

    samples: int = Field(default=1, ge=1)
    """Number of completions per prompt. 1: a greedy one. More are sampled with `rollout.sampling`, with the same seeds
    in each evaluation. Then `eval/<term>` is their mean, and `eval/<term>/pass@k` the probability that one of k passes,
    for k = 2, 4, ... and `samples`."""

    pass_reward: float = 1.0
    """A completion passes if the value of the term is at least this."""


class FieldsConfig(Section):
    """Names of the fields of a row.

    A name with dots that is no column is a path into objects and lists, or into their JSON text:
    `reward_model.ground_truth`. A name that differs from its default needs to be in a row of the file.
    """

    prompt: str = "prompt"
    """Field of the prompt: a string, or a list of chat messages `{role, content}`. Default: `prompt`, or the field of a
    known format: `messages`, `conversations`, `question`, `problem`, `responses_create_params.input`, or `instruction`
    with `input`."""

    answer: str = "answer"
    """Field of the reference answer that rewards compare with, or of a list of answers of which each is right; optional
    in each row. Default: `answer`, or the field of a known format: `reward_model.ground_truth`, `label`,
    `expected_answer`, `ground_truth`, `info.answer`, `extra_info.answer`, or `output` in rows with `instruction`."""

    response: str = "response"
    """Field of the demonstration that `megarl sft` trains on."""

    messages: str = "messages"
    """Field of a conversation that `megarl sft` trains on: a list of chat messages, of which those of the assistant are
    trained on."""

    tools: str = "tools"
    """Field of the definitions of tools that the chat template writes: a list, or its JSON text; optional in each
    row."""

    chosen: str = "chosen"
    """Field of the preferred answer of a pair, for `megarl rm` and `megarl dpo`: a text, messages after the prompt, or
    a conversation that begins with the prompt."""

    rejected: str = "rejected"
    """Field of the other answer of a pair."""

    margin: str = "margin"
    """Field of the margin, 0 or more, by which a reward or cost model should separate the scores of a pair; optional in
    each row."""

    chosen_safe: str = "chosen_safe"
    """Field of a boolean: whether the chosen answer is safe. For cost models; all rows of a file have it, or
    none."""

    rejected_safe: str = "rejected_safe"
    """Field of a boolean: whether the rejected answer is safe. Rows with `chosen_safe` need it."""


class PromptFormat(Section):
    """How the rows of a file become prompts."""

    fields: FieldsConfig = FieldsConfig()
    """Names of the fields of a row."""

    prompt_template: str = "{prompt}"
    """Template of string prompts, applied before tokenization; `{prompt}` is replaced by the field's text, other names
    in braces by the columns of these names, as in `{context}\n{question}`."""

    chat_template: Literal["auto", "always", "never"] = "auto"
    """Whether to apply the tokenizer's chat template. `auto`: if the tokenizer has one."""

    chat_template_name: str | None = None
    """Name of the chat template to use, of a tokenizer that has several. Default: `default`, or `tool_use` for rows
    with tools, if there is one."""

    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, such as `enable_thinking: false` or `reasoning_effort: high`, wherever it is
    applied. Requests to a harness's gateway may change them with their own `chat_template_kwargs`."""

    last_assistant: Literal["error", "drop", "continue"] = "error"
    """What to do with a prompt whose last message is one of the assistant, which the policy would answer with a second
    one. `error`: refuse the row. `drop`: remove the messages of the assistant at the end. `continue`: the policy
    continues the text of the last message; not with environments."""

    system_prompt: str | None = None
    """System message put before the user's message; needs a chat template. Default: none."""

    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Maximum prompt length in tokens. Default: the model's context length less `rollout.max_new_tokens`."""

    overlong_prompts: Literal["error", "drop"] = "error"
    """What to do with longer prompts: end with an error, or drop the row."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_kwargs(cls, values: dict[str, Any]) -> dict[str, Any]:
        problem = describe_bad_template_kwargs(values)
        if problem is not None:
            raise ValueError(problem)
        return values


class SourceConfig(PromptFormat):
    """One of several sources of prompts. What describes its rows is by default as in `data`."""

    path: FilePath
    """File of the training rows, as `data.path`."""

    ratio: float = Field(gt=0, le=1)
    """Share of the prompts that come from this source, with at most four decimals. All ratios sum to 1."""

    eval_path: FilePath | None = None
    """File of held-out rows. Default: this source takes no part in evaluation."""

    eval_size: int | None = Field(default=None, ge=1)
    """Number of held-out rows to evaluate on, from the start of the file. Default: all."""

    reward_terms: list[str] | None = None
    """Names of the terms of `reward.terms` that score completions of this source. Default: all. Reward models score all
    sources."""

    max_new_tokens: int | None = Field(default=None, ge=1)
    """As `rollout.max_new_tokens`, for this source; at most that."""

    env: EnvironmentConfig | None = None
    """Environment of this source. Default: `rollout.env`, or the agent."""

    @field_validator("ratio")
    @classmethod
    def _check_decimals(cls, ratio: float) -> float:
        if abs(ratio * 10_000 - round(ratio * 10_000)) > 1e-6:
            raise ValueError(f"a ratio has at most four decimals, got {ratio}")
        return ratio


class DifficultyConfig(Section):
    """Which prompts to train on, by the pass rate of their group: the share of its completions that pass."""

    term: str | None = None
    """Name of the rule in `reward.terms` that decides. Default: `reward.eval_term`."""

    pass_reward: float = 1.0
    """A completion passes if the value of the term is at least this."""

    min_pass_rate: float = Field(default=0.0, ge=0, le=1)
    """Groups with a lower pass rate are not trained on; others are sampled in their place."""

    max_pass_rate: float = Field(default=1.0, ge=0, le=1)
    """Groups with a higher pass rate are not trained on; others are sampled in their place."""

    max_batches: int = Field(default=4, ge=1)
    """Number of batches that a step samples at most to replace groups; then it trains on fewer."""

    retire_after: int | None = Field(default=None, ge=1)
    """After this many groups in a row whose completions have all passed, a prompt is not sampled any more. Needs
    `schedule.type: sync`. Default: prompts are not retired."""

    @model_validator(mode="after")
    def _check_bounds(self) -> DifficultyConfig:
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(
                f"min_pass_rate needs to be at most max_pass_rate = {self.max_pass_rate:g}, got {self.min_pass_rate:g}"
            )
        return self


class DataConfig(PromptFormat):
    """Prompts, demonstrations or preference pairs from data files."""

    path: FilePath | None = None
    """File of the training rows, a folder of files, or a pattern such as `train-*.parquet`: JSONL, JSON or CSV, as they
    are or compressed (`.gz`), Parquet or Arrow. Needed, unless there are `sources`. On the Hugging Face Hub:
    `hf://datasets/ORGANIZATION/NAME/FILE`, with a branch, tag or commit `NAME@REVISION`; FILE may be a pattern."""

    eval_path: FilePath | None = None
    """File of held-out rows for `megarl eval` and for evaluation during training. Default: no evaluation."""

    eval_size: int | None = Field(default=None, ge=1)
    """Number of held-out rows to evaluate on, from the start of the file. Default: all."""

    hub_revisions: dict[str, str] = Field(default={})
    """Commit hash by dataset on the hub, `ORGANIZATION/NAME` or with its revision, as paths name it. A run records here
    what it has downloaded, and uses the same commits when it is resumed. Default: the latest commits."""

    shuffle: bool = True
    """Shuffle the training rows, with the run's seed."""

    sources: dict[str, SourceConfig] = Field(default={})
    """Name -> source, for `megarl train` on several files in fixed ratios, instead of `path` and `eval_path`."""

    difficulty: DifficultyConfig | None = None
    """Which prompts `megarl train` trains on, by their pass rate. null: all."""

    template_date: date = Field(default_factory=lambda: date.today())
    """Date, `YYYY-MM-DD`, that chat templates write into prompts where they ask for the current one with
    `strftime_now`, in training, environments and evaluation. A run records it here, and keeps it when it is resumed.
    Default: the day on which the run begins."""

    @field_validator("template_date", mode="before")
    @classmethod
    def _check_date(cls, value: object) -> object:
        if isinstance(value, date) and not isinstance(value, datetime):
            return value
        try:
            return datetime.strptime(str(value), "%Y-%m-%d").date()
        except ValueError:
            raise ValueError(f"needs a date, YYYY-MM-DD, got {value}") from None

    @model_validator(mode="after")
    def _check_sources(self) -> DataConfig:
        if (self.path is None) == (not self.sources):
            got = "neither" if self.path is None else "both"
            raise ValueError(f"needs either path or sources, got {got}")
        if not self.sources:
            return self
        for key in ("eval_path", "eval_size"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key}: with sources, each source has its own, data.sources.NAME.{key}")
        for name in self.sources:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ValueError(f"sources: a name needs letters, digits, - and _ only, got {name!r}")
        total = sum(source.ratio for source in self.sources.values())
        if abs(total - 1) > 1e-6:
            ratios = " + ".join(f"{source.ratio:g}" for source in self.sources.values())
            raise ValueError(f"sources: the ratios need to sum to 1, got {ratios} = {total:g}")
        return self

    @property
    def file(self) -> str:
        """The only file of training rows; not for a configuration with sources."""
        assert self.path is not None, "data.sources: the files are those of resolved_sources"
        return self.path

    @property
    def resolved_sources(self) -> tuple[Source, ...]:
        """The sources with all their settings; a single file is one source without a name."""
        shared = {name: getattr(self, name) for name in PromptFormat.model_fields}
        if not self.sources:
            own = {"path": self.file, "ratio": 1.0, "eval_path": self.eval_path, "eval_size": self.eval_size}
            return (
                Source(
                    name="", key="data", config=SourceConfig.model_validate({**shared, **own}), day=self.template_date
                ),
            )
        return tuple(
            Source(
                name=name,
                key=f"data.sources.{name}",
                config=source.model_copy(update={k: v for k, v in shared.items() if k not in source.model_fields_set}),
                day=self.template_date,
            )
            for name, source in self.sources.items()
        )

    @property
    def training_files(self) -> dict[str, str]:
        """YAML key -> path of each file of training rows."""
        return {f"{source.key}.path": source.config.path for source in self.resolved_sources}

    @property
    def held_out_files(self) -> dict[str, str]:
        """YAML key -> path of each file of held-out rows."""
        found = {f"{source.key}.eval_path": source.config.eval_path for source in self.resolved_sources}
        return {key: path for key, path in found.items() if path is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of prompts with all its settings."""

    name: str
    """Empty for the only file of a run."""
    key: str
    """YAML key of the section with the path."""
    config: SourceConfig
    day: date
    """Date that chat templates write into prompts."""
