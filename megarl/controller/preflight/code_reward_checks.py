"""Checks of the rows that terms of type `code` score: test cases, and reference solutions in the sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from megarl.config.reward import CodeRewardConfig
from megarl.config.run import RunConfig
from megarl.controller.preflight.data_checks import list_examples
from megarl.data.rows import Row, read_rows
from megarl.errors import ConfigError, DataError, SandboxError
from megarl.reward.code.assertions import TestCaseError
from megarl.reward.code.grading import describe_failure, is_passed
from megarl.reward.code.test_cases import ReferenceSandbox, RowTests, find_solution, load_tests
from megarl.sandbox.sandbox import Sandbox
from megarl.sandbox.tiers import open_sandbox

MAX_EXAMPLES = 3
"""Reference solutions that a message names; trying ends after them."""

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
