"""Checks of batch sizes, the tokenizer and the data files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.data import Source
from megarl.config.reward import JudgeRewardConfig, MathRewardConfig, NumericRewardConfig
from megarl.config.run import PreferenceConfig, RmConfig, RunConfig, StageConfig, SupervisedStageConfig
from megarl.controller.preflight.data_report import (
    FileReport,
    find_answer_terms,
    find_shared_prompts,
    measure_sample,
    start_report,
)
from megarl.controller.preflight.model_checks import find_token_limit
from megarl.controller.preflight.row_reading import TokenReader
from megarl.data.account import SAMPLE_ROWS
from megarl.data.rows import Row, read_rows
from megarl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.batch.trajectory import Prompt
    from megarl.model_files.json_object import JsonMapping

MAX_EXAMPLES = 3
"""Rows that a message names; it has the number of the others."""

NUM_COMPARED_ANSWERS = 200
"""Reference answers of a file that are compared with themselves by sympy, in some seconds."""

_READABLE = {"numeric": "a number (the reward math has other answers)", "math": "an answer that can be compared"}


def find_batch_problems(config: StageConfig) -> Iterator[str]:
    """Find batches with fewer samples than data-parallel ranks."""
    if isinstance(config, SupervisedStageConfig):
        if config.trainer.batch_size < config.dp:
            what = "pair" if isinstance(config, PreferenceConfig) else "demonstration"
            yield (
                f"trainer.batch_size: needs at least one {what} per data-parallel rank, got "
                f"{config.trainer.batch_size} < dp = {_describe_dp(config)}"
            )
        return
    assert isinstance(config, RunConfig)
    a = config.algorithm
    trajectories = a.prompts_per_step * a.group_size // a.num_mini_batches
    if trajectories < config.dp:
        yield (
            f"algorithm.prompts_per_step: a mini-batch needs at least one completion per data-parallel rank, got "
            f"prompts_per_step * group_size / num_mini_batches = {a.prompts_per_step} * {a.group_size} / "
            f"{a.num_mini_batches} = {trajectories} < dp = {_describe_dp(config)}"
        )


def _describe_dp(config: StageConfig) -> str:
    return f"slots / (tp * pp * cp) = {config.placement.slots} / {config.trainer.parallel.model_size} = {config.dp}"


def find_data_problems(
    config: StageConfig, hf_config: JsonMapping | None, reports: list[FileReport] | None = None
) -> list[str]:
    """Find problems of the tokenizer and the data files.

    Args:
        hf_config: content of the model's config.json; None: unknown. Without it or without a tokenizer, rows are only
            parsed.
        reports: receives the report of each file without problems.
    """
    from megarl.data.tokenizer import load_tokenizer  # imports transformers, which the other checks do without

    problems: list[str] = []
    tokenizer: PreTrainedTokenizerBase | None = None
    if Path(config.model.path).is_dir():
        try:
            tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        except DataError as e:
            problems.append(f"model.path: {e}")
    for source in config.data.resolved_sources:
        limit: int | None = None
        if hf_config is not None:
            try:
                limit = find_token_limit(config, hf_config, source)
            except ConfigError as e:
                problems.append(str(e))
        for name, path in (("path", source.config.path), ("eval_path", source.config.eval_path)):
            if path is None:
                continue
            try:
                sample_rows = 0 if tokenizer is None or limit is None else SAMPLE_ROWS
                report = None
                if reports is not None:
                    report = start_report(config, source, name, tokenizer, sample_rows=sample_rows)
                _read_data(config, source, path, tokenizer, limit, report)
                if report is not None and tokenizer is not None and limit is not None:
                    measure_sample(report, TokenReader(config, source, tokenizer), limit)
            except (DataError, ConfigError) as e:
                # Problems of the whole section start with their own key.
                problems.append(str(e) if str(e).startswith("data.") else f"{source.key}.{name}: {e}")
                continue
            if reports is not None and report is not None:
                reports.append(report)
    if reports is not None:
        find_shared_prompts(reports)
    return problems


def _read_data(
    config: StageConfig,
    source: Source,
    path: str,
    tokenizer: PreTrainedTokenizerBase | None,
    token_limit: int | None,
    report: FileReport | None,
) -> None:
    """Read a file as its stage does, and count its rows in `report`.

    Raises:
        DataError: the file or a row cannot be used.
    """
    from megarl.data.demonstrations import tokenize_demonstrations
    from megarl.data.preference_pairs import tokenize_preferences
    from megarl.data.prompts import tokenize_prompts

    def count(row: Row) -> bool:
        if report is not None:
            report.account.add(row)
        return True

    kept: int | None = None
    rows = filter(count, read_rows(path))
    is_demonstration = not isinstance(config, RunConfig | PreferenceConfig)
    if tokenizer is None or token_limit is None or (is_demonstration and path != source.config.path):
        for _ in rows:
            pass
    elif isinstance(config, RunConfig):
        prompts = tokenize_prompts(source, tokenizer, path=path, max_prompt_tokens=token_limit, is_kept=count)
        kept = _require_answers(config, source, prompts)
    elif isinstance(config, PreferenceConfig):
        safety = isinstance(config, RmConfig) and config.rm.kind == "cost"
        pairs = tokenize_preferences(config.data, tokenizer, rows, max_tokens=token_limit, path=path, safety=safety)
        kept = sum(1 for _ in pairs)
    else:
        samples = tokenize_demonstrations(config.data, tokenizer, rows, max_tokens=token_limit, path=path)
        kept = sum(1 for _ in samples)
    if report is not None and kept is not None:
        report.num_overlong = report.account.num_usable - kept


def _require_answers(config: RunConfig, source: Source, prompts: Iterable[Prompt]) -> int:
    """Check that each row has a reference answer, if a term needs one, that the terms `numeric` and `math` can read.

    Returns:
        The number of prompts.

    Raises:
        DataError: rows have none, or one that cannot be read; names the first rows.
    """
    needing = find_answer_terms(config, source)
    field = source.config.fields.answer
    rows, without, num_prompts = list[tuple[str, tuple[str, ...]]](), list[str](), 0
    for prompt in prompts:  # reads all prompts in any case
        num_prompts += 1
        if needing:
            rows.append((prompt.prompt_id, prompt.answers))
            if prompt.answer is None:
                without.append(f"{prompt.prompt_id}{_describe_missing(prompt.row.get(field))}")
    if not needing:
        return num_prompts
    name, term = next(iter(needing.items()))
    if without:
        raise DataError(
            f"reward.terms.{name} ({term.type}) needs field {field!r} "
            f"({source.key}.fields.answer), {len(without)} of {len(rows)} rows have none, first {without[0]}"
        )
    for name, term in needing.items():
        problems = [] if isinstance(term, JudgeRewardConfig) else _find_unreadable_answers(rows, term)
        if problems:
            raise DataError(
                f"reward.terms.{name} ({term.type}) needs {_READABLE[term.type]} in field "
                f"{field!r} ({source.key}.fields.answer), "
                f"{len(problems)} of {len(rows)} rows have others: {list_examples(problems, MAX_EXAMPLES)}"
            )
    return num_prompts


def _describe_missing(value: object) -> str:
    """Return what a row has in the place of an answer, for a message; empty if it has nothing."""
    match value:
        case None:
            return ""
        case str() | float():
            return f" ({value!r})"
        case _:
            return f" (of type {type(value).__name__}, not a text, an integer or a float)"


def _find_unreadable_answers(
    rows: Sequence[tuple[str, tuple[str, ...]]], term: NumericRewardConfig | MathRewardConfig
) -> list[str]:
    """Return a message for each row whose reference answer the term cannot compare with itself.

    Of the answers that need algebra, at most `NUM_COMPARED_ANSWERS` at equal distances are tried.
    """
    from megarl.reward.math_equivalence import EquivalenceError, require_comparable
    from megarl.reward.terms import extract_reference, is_number, reference_structure

    if isinstance(term, NumericRewardConfig):
        if term.strict:
            return []
        return [
            f"{place}: {extract_reference(answers[0])[:80]!r}"
            for place, answers in rows
            if answers and not any(map(is_number, answers))
        ]
    problems = list[str]()
    structures = [
        (place, answer, structure)
        for place, answers in rows
        for answer in answers
        if (structure := reference_structure(answer)) is not None
    ]
    for place, answer, structure in structures[:: max(1, len(structures) // NUM_COMPARED_ANSWERS)]:
        try:
            require_comparable(structure, term.cpu_seconds, term.timeout_seconds)
        except EquivalenceError as e:
            problems.append(f"{place}: {extract_reference(answer)[:80]!r} ({e})")
    return problems


def list_examples(problems: Sequence[str], most: int) -> str:
    """Return the first problems for a message, at most `most`, and the number of the others."""
    rest = len(problems) - most
    return "; ".join(problems[:most]) + (f"; and {rest} more" if rest > 0 else "")
