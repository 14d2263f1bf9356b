"""Checks of batch sizes, the tokenizer, the chat template, the data files, and the test cases of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables

from megarl.config.data import Source
from megarl.config.reward import CodeRewardConfig, JudgeRewardConfig, MathRewardConfig, NumericRewardConfig
from megarl.config.run import PreferenceConfig, RmConfig, RunConfig, StageConfig, SupervisedStageConfig
from megarl.controller.preflight.data_report import (
    FileReport,
    TokenReader,
    find_answer_terms,
    find_shared_prompts,
    measure_sample,
    start_report,
)
from megarl.controller.preflight.model_checks import find_token_limit
from megarl.data.account import SAMPLE_ROWS
from megarl.data.rows import Row, read_rows
from megarl.errors import ConfigError, DataError, SandboxError
from megarl.reward.code_assertions import TestCaseError
from megarl.reward.code_grading import describe_failure, is_passed
from megarl.reward.test_cases import ReferenceSandbox, RowTests, find_solution, load_tests
from megarl.sandbox.sandbox import Sandbox
from megarl.sandbox.tiers import open_sandbox

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from transformers import PreTrainedTokenizerBase

    from megarl.batch.trajectory import Prompt
    from megarl.model_files.json_object import JsonMapping


class _GenerationMarks(Extension):
    """Parses `{% generation %}` as transformers does, as its content."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def find_template_variables(source: str) -> frozenset[str]:
    """Return the names of variables that a chat template reads.

    Raises:
        TemplateError: it cannot be parsed.
    """
    environment = Environment(extensions=[_GenerationMarks, loopcontrols])  # noqa: S701  # nothing is rendered
    return frozenset(find_undeclared_variables(environment.parse(source)))


def find_template_notices(config: StageConfig) -> Iterator[str]:
    """Yield a sentence for each variable without effect, and for each template that ends turns without a stop token.

    Yields nothing for a model whose folder has no tokenizer yet.
    """
    from megarl.data.tokenizer import load_tokenizer  # imports transformers, which the other checks do without

    if not Path(config.model.path).is_dir():
        return
    try:
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    except DataError:
        return  # the checks of the data report it
    ends = set[str]()
    for source in config.data.resolved_sources:
        yield from _find_unused_variables(source, tokenizer)
        ends.update(_find_endless_turns(source, tokenizer))
    yield from sorted(ends)


def _find_unused_variables(source: Source, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    from megarl.data.chat_template import chat_template_source

    given, key = source.config.chat_template_kwargs, f"{source.key}.chat_template_kwargs"
    if not given:
        return
    if source.config.chat_template == "never" or tokenizer.chat_template is None:
        yield f"{key} has no effect: there is no chat template"
        return
    templates = tokenizer.chat_template
    names = [source.config.chat_template_name or name for name in templates] if isinstance(templates, dict) else [None]
    try:
        read = frozenset[str]().union(
            *(find_template_variables(chat_template_source(tokenizer, name)) for name in names)
        )
    except TemplateError:
        return  # rendering the first row reports it
    for name in sorted(given.keys() - read):
        yield f"{key}.{name} has no effect: the chat template does not read a variable of this name"


def _find_endless_turns(source: Source, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    from megarl.data.chat_template import find_turn_end, has_chat_template, read_end_ids, template_options

    config = source.config
    if config.chat_template == "never" or not has_chat_template(tokenizer, config.chat_template_name, key=source.key):
        return
    found, stops = find_turn_end(tokenizer, source.day, template_options(config, tokenizer)), read_end_ids(tokenizer)
    if found is None or stops.intersection(found):
        return
    known = ", ".join(f"{tokenizer.convert_ids_to_tokens(each)!r} ({each})" for each in sorted(stops))
    if not found:
        end = "writes nothing after the assistant's turn"
    else:
        tokens = ", ".join(map(str, found))
        end = f"ends the assistant's turn with {tokenizer.decode(found)!r} (tokens {tokens}), which has no stop token"
    yield (
        f"model.path: the chat template {end}; generation ends at {known} alone, so that a policy that ends its turns "
        "as the template does runs on to its length limit: add the token to eos_token_id in generation_config.json"
    )


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


MAX_REFUSED = 20
"""Rows without usable test cases that a message names; it has the number of the others."""

NUM_SOLUTIONS = 8
"""Reference solutions of a file that are tried."""

SolvedRow = tuple[Row, RowTests, str]
"""A row with its tests and a reference solution."""


def find_test_case_problems(config: RunConfig) -> Iterator[str]:
    """Find data files with rows whose test cases a term of type `code` cannot use, unless it drops them."""
    for name, term, key, rows in _scored_files(config):
        report = CodeRowsReport(key=key, term=name)
        try:
            for _ in _graded_rows(rows, term, report):
                pass
        except DataError:
            continue  # reported with the data files
        except ConfigError as e:
            yield str(e)
            continue
        except SandboxError as e:
            yield f"reward.terms.{name}.sandbox: {e}"
            continue
        if report.refused and (term.ungradable_rows == "error" or len(report.refused) == report.num_rows):
            yield (
                f"{key}: reward.terms.{name} (code) needs test cases that it can use in each row, "
                f"{len(report.refused)} of {report.num_rows} rows have others (ungradable_rows: drop leaves them out): "
                f"{report.examples()}"
            )


@dataclass(kw_only=True)
class CodeRowsReport:
    """Rows of a file that a term can grade, and reference solutions that were run on the tests of their rows."""

    key: str
    """YAML key of the file."""
    term: str
    num_rows: int = 0
    refused: list[str] = field(default_factory=list)
    """One message for each row that cannot be graded."""
    num_tried: int = 0
    failures: list[str] = field(default_factory=list)
    """One message for each solution that does not score 1; trying ends after `MAX_EXAMPLES` of them."""

    def lines(self) -> list[str]:
        """Return a sentence about the rows and, if there are reference solutions, one about them."""
        head = f"{self.key}: reward.terms.{self.term} (code):"
        graded = f"{head} {self.num_rows - len(self.refused)} of {self.num_rows} rows can be graded"
        if self.refused:
            graded += f", {len(self.refused)} are dropped: {self.examples()}"
        if not self.num_tried:
            return [graded]
        what = "reference solutions that were tried"
        if not self.failures:
            return [graded, f"{head} {self.num_tried} of {self.num_tried} {what} score 1"]
        failed = f"{len(self.failures)} of {self.num_tried} {what} do not score 1: {'; '.join(self.failures)}"
        return [graded, f"{head} {failed}"]

    def examples(self) -> str:
        """Return the first rows that cannot be graded, with the reasons, and the number of the others."""
        return list_examples(self.refused, MAX_REFUSED)


def report_code_rows(config: RunConfig) -> list[CodeRowsReport]:
    """Return a report for each data file of a term, after running some reference solutions in the term's sandbox.

    The configuration needs to have passed `find_test_case_problems`.

    Raises:
        ConfigError: the sandbox cannot be used, or no solution of a file scores 1, so that no completion would.
    """
    reports, problems = list[CodeRowsReport](), list[str]()
    for name, term, key, rows in _scored_files(config):
        report = CodeRowsReport(key=key, term=name)
        sandbox = open_sandbox(term.sandbox, key=f"reward.terms.{name}.sandbox")
        try:
            solved = (
                (row, tests, solution)
                for row, tests in _graded_rows(rows, term, report)
                if (solution := find_solution(row.fields, term.solution_field)) is not None
            )
            for row, tests, solution in _spread(solved):
                report.num_tried += 1
                if (failure := find_failure(tests, solution, sandbox)) is not None:
                    report.failures.append(f"{row.where}: {failure}")
                    if len(report.failures) == MAX_EXAMPLES:
                        break
        except SandboxError as e:
            problems.append(f"reward.terms.{name}.sandbox: {e}")
            continue
        finally:
            sandbox.close()
        reports.append(report)
        if report.num_tried and len(report.failures) == report.num_tried:
            problems.append(report.lines()[-1])
    if problems:
        raise ConfigError("\n".join(problems))
    return reports


def _graded_rows(rows: Iterable[Row], term: CodeRewardConfig, report: CodeRowsReport) -> Iterator[tuple[Row, RowTests]]:
    """Yield the rows that a term can grade, with their tests, and note the others in the report."""
    references = ReferenceSandbox(term.sandbox, key=f"reward.terms.{report.term}.sandbox")
    try:
        for row in rows:
            report.num_rows += 1
            try:
                yield row, load_tests(row.fields, term, references.run)
            except TestCaseError as e:
                report.refused.append(f"{row.where}: {e}")
    finally:
        references.close()


def _scored_files(config: RunConfig) -> Iterator[tuple[str, CodeRewardConfig, str, Iterable[Row]]]:
    """Yield name and section of each term of type `code`, and YAML key and rows of each file that it scores."""
    for name, term in config.reward.terms.items():
        if not isinstance(term, CodeRewardConfig):
            continue
        for source in config.data.resolved_sources:
            if source.config.reward_terms is not None and name not in source.config.reward_terms:
                continue
            yield name, term, f"{source.key}.path", _rows(source.config.path)
            if source.config.eval_path is not None:
                yield name, term, f"{source.key}.eval_path", _rows(source.config.eval_path, source.config.eval_size)


def _rows(path: str, size: int | None = None) -> Iterator[Row]:
    """Yield the first `size` rows of a file; None: all."""
    yield from islice(read_rows(path), size)


def _spread(rows: Iterable[SolvedRow]) -> list[SolvedRow]:
    """Return up to `NUM_SOLUTIONS` rows at equal distances, the first among them."""
    chosen, distance = list[SolvedRow](), 1
    for i, row in enumerate(rows):
        if i % distance == 0:
            chosen.append(row)
            if len(chosen) > NUM_SOLUTIONS:
                chosen, distance = chosen[::2], 2 * distance
    return chosen


def find_failure(tests: RowTests, solution: str, sandbox: Sandbox) -> str | None:
    """Return the first test that a row's solution does not pass, and what came out; None: it scores 1."""
    outcomes = sandbox.run(tests.make_program(solution))
    for i, (test, outcome) in enumerate(zip(tests.cases, outcomes, strict=True)):
        if not is_passed(test, outcome):
            return f"test {i}: {describe_failure(test, outcome)}"
    return None
