"""Checks of the rows that terms of type `code` score: test cases, and reference solutions in the sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from megarl.config.reward_code import CodeRewardConfig
from megarl.config.run import RunConfig
from megarl.data.rows import Row, read_rows
from megarl.errors import ConfigError, DataError, SandboxError
from megarl.reward.code.grading import describe_failure, is_passed
from megarl.reward.code.test_cases import TestCaseError, make_program, parse_setup, parse_tests
from megarl.sandbox.sandbox import Sandbox
from megarl.sandbox.tiers import open_sandbox

MAX_EXAMPLES = 3
"""Rows that a message names; it has the number of the others."""

NUM_SOLUTIONS = 8
"""Reference solutions of a file that are tried."""


def find_test_case_problems(config: RunConfig) -> Iterator[str]:
    """Find data files with rows whose test cases, or setup, a term of type `code` cannot use."""
    for name, term, key, rows in _scored_files(config):
        num_rows, problems = 0, list[str]()
        try:
            for row in rows:
                num_rows += 1
                try:
                    parse_tests(row.fields, term.tests_field)
                    parse_setup(row.fields, term.setup_field)
                except TestCaseError as e:
                    problems.append(f"{row.where}: {e}")
        except DataError:
            continue  # reported with the data files
        if problems:
            yield (
                f"{key}: reward.terms.{name} (code) needs test cases that it can use in each row, {len(problems)} of "
                f"{num_rows} rows have others: {_examples(problems)}"
            )


@dataclass(kw_only=True)
class SolutionReport:
    """Reference solutions of a file that were run on the tests of their rows."""

    key: str
    """YAML key of the file."""
    term: str
    solution_field: str
    num_tried: int = 0
    failures: list[str] = field(default_factory=list)
    """One message for each solution that does not score 1; trying ends after `MAX_EXAMPLES` of them."""

    def __str__(self) -> str:
        """Return one sentence about the file."""
        head = f"{self.key}: reward.terms.{self.term} (code):"
        what = f"reference solutions that were tried (field {self.solution_field!r})"
        if not self.failures:
            return f"{head} {self.num_tried} of {self.num_tried} {what} score 1"
        return f"{head} {len(self.failures)} of {self.num_tried} {what} do not score 1: {'; '.join(self.failures)}"


def try_solutions(config: RunConfig) -> list[SolutionReport]:
    """Run some reference solutions of each data file in the sandbox of its term, and return a report for each file.

    Files without solutions have none. The configuration needs to have passed `find_test_case_problems`.

    Raises:
        ConfigError: the sandbox cannot be used, or no solution of a file scores 1, so that no completion would.
    """
    reports, problems = list[SolutionReport](), list[str]()
    for name, term, key, rows in _scored_files(config):
        if term.solution_field is None:
            continue
        report = SolutionReport(key=key, term=name, solution_field=term.solution_field)
        chosen = _spread(row for row in rows if isinstance(row.fields.get(report.solution_field), str))
        sandbox = open_sandbox(term.sandbox, key=f"reward.terms.{name}.sandbox")
        try:
            for row in chosen:
                report.num_tried += 1
                if (failure := _find_failure(row, term, report.solution_field, sandbox)) is not None:
                    report.failures.append(f"{row.where}: {failure}")
                    if len(report.failures) == MAX_EXAMPLES:
                        break
        except SandboxError as e:
            problems.append(f"reward.terms.{name}.sandbox: {e}")
            continue
        finally:
            sandbox.close()
        if report.num_tried:
            reports.append(report)
            if len(report.failures) == report.num_tried:
                problems.append(str(report))
    if problems:
        raise ConfigError("\n".join(problems))
    return reports


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


def _spread(rows: Iterable[Row]) -> list[Row]:
    """Return up to `NUM_SOLUTIONS` rows at equal distances, the first among them."""
    chosen, distance = list[Row](), 1
    for i, row in enumerate(rows):
        if i % distance == 0:
            chosen.append(row)
            if len(chosen) > NUM_SOLUTIONS:
                chosen, distance = chosen[::2], 2 * distance
    return chosen


def _find_failure(row: Row, term: CodeRewardConfig, solution_field: str, sandbox: Sandbox) -> str | None:
    """Return the first test that a row's solution does not pass, and what came out; None: it scores 1."""
    tests = parse_tests(row.fields, term.tests_field)
    setup = parse_setup(row.fields, term.setup_field)
    outcomes = sandbox.run(make_program(row.fields[solution_field], setup, tests))
    for i, (test, outcome) in enumerate(zip(tests, outcomes, strict=True)):
        if not is_passed(test, outcome):
            return f"{term.tests_field}[{i}] {describe_failure(test, outcome)}"
    return None


def _examples(problems: list[str]) -> str:
    more = len(problems) - MAX_EXAMPLES
    return "; ".join(problems[:MAX_EXAMPLES]) + (f"; and {more} more" if more > 0 else "")
