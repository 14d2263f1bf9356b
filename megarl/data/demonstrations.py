"""Load demonstrations for supervised fine-tuning from a data file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.batch.trajectory import Trajectory
from megarl.config.data import DataConfig
from megarl.data.chat_template import PromptTemplate
from megarl.data.progress_bar import track
from megarl.data.prompts import OverlongFilter, batch_rows
from megarl.data.rows import Row, read_rows
from megarl.errors import DataError


def load_demonstrations(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, path: str | None = None
) -> list[Trajectory]:
    """Return each row of `path` (default: `data.path`) as prompt + response + eos, with its index as `group_id`.

    A response that ends in eos gets no other.

    Prompt and response are tokenized separately, so that the prompt's tokens are those that generation starts from.

    Raises:
        DataError: a row lacks prompt or response, one of them has no tokens, or both have more than `max_tokens` while
            `data.overlong_prompts` is `error` (the message names file:line); or no row is left.
    """
    file = Path(path or config.file)
    template = PromptTemplate(config, tokenizer, config.template_date)
    overlong = OverlongFilter(file, config.overlong_prompts, max_tokens, "demonstration", "the context length")
    demonstrations: list[Trajectory] = []
    for rows in track(batch_rows(read_rows(file)), f"tokenizing {file.name}"):
        prompts = template.tokenize_rows(rows)
        texts = [_read_response(row, config.fields.response) for row in rows]
        responses = template.tokenize_responses(rows, texts, "response")
        for row, prompt, response in zip(rows, prompts, responses, strict=True):
            if overlong.keep(row, len(prompt) + len(response)):
                demonstrations.append(make_supervised_trajectory(row, prompt, response, group_id=len(demonstrations)))
    overlong.report_dropped(num_kept=len(demonstrations))
    return demonstrations


def make_supervised_trajectory(row: Row, prompt: list[int], response: list[int], *, group_id: int) -> Trajectory:
    """Return prompt and response as a trajectory whose response counts as sampled by the policy."""
    num_tokens = len(prompt) + len(response)
    loss_mask = np.zeros(num_tokens, dtype=np.bool_)
    loss_mask[len(prompt) :] = True
    return Trajectory(
        prompt_id=row.prompt_id,
        group_id=group_id,
        token_ids=np.array(prompt + response, dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        policy_versions=np.full(num_tokens, -1, dtype=np.int32),
    )


def _read_response(row: Row, field: str) -> str:
    if field not in row.fields:
        has = ", ".join(repr(name) for name in row.fields) or "no fields"
        raise DataError(
            f"{row.where}: a demonstration needs field {field!r} (data.fields.response), the text to train on; "
            f"the row has {has}"
        )
    return row.response(field, "data.fields.response")
