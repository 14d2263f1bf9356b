"""The section `data`: prompt, demonstration and preference files."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.section import Section


class FieldsConfig(Section):
    """Names of the fields of a row."""

    prompt: str = "prompt"
    """Field of the prompt: a string, or a list of chat messages `{role, content}`."""

    answer: str = "answer"
    """Field of the reference answer that rewards compare with; optional in each row."""

    response: str = "response"
    """Field of the demonstration that `megarl sft` trains on."""

    chosen: str = "chosen"
    """Field of the preferred answer of a pair, for `megarl rm` and `megarl dpo`."""

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


class DataConfig(Section):
    """Prompts, demonstrations or preference pairs from JSONL or Parquet files."""

    path: str
    """File of the training rows: `*.jsonl` or `*.parquet`."""

    eval_path: str | None = None
    """File of held-out rows for `megarl eval` and for evaluation during training. Default: no evaluation."""

    eval_size: int | None = Field(default=None, ge=1)
    """Number of held-out rows to evaluate on, from the start of the file. Default: all."""

    fields: FieldsConfig = FieldsConfig()
    """Names of the fields of a row."""

    prompt_template: str = "{prompt}"
    """Template of string prompts, applied before tokenization; `{prompt}` is replaced by the field's text."""

    chat_template: Literal["auto", "always", "never"] = "auto"
    """Whether to apply the tokenizer's chat template. `auto`: if the tokenizer has one."""

    system_prompt: str | None = None
    """System message put before the user's message; needs a chat template. Default: none."""

    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Maximum prompt length in tokens. Default: the model's context length less `rollout.max_new_tokens`."""

    overlong_prompts: Literal["error", "drop"] = "error"
    """What to do with longer prompts: end with an error, or drop the row."""

    shuffle: bool = True
    """Shuffle the training rows, with the run's seed."""
