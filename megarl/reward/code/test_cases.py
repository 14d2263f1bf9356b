"""Test cases of a row: inputs, which go into a sandbox, separated from expected outputs, which do not.

Layouts of data sets are recognized by their fields, and read as published.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import logging
import pickletools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.config.data import Source
from megarl.config.reward import AUTO, CodeRewardConfig, SandboxConfig
from megarl.config.run import RunConfig
from megarl.data.rows import Row
from megarl.reward.code.assertions import (
    NO_PYTHON,
    RECORDED,
    AssertionTests,
    TestCaseError,
    parse_assertions,
    parse_check_function,
)
from megarl.reward.code.comparison import GradingClock, Tolerance, UndecidedError, prints_fractions, read_value
from megarl.reward.code.grading import TestCase, describe_end, output_bytes
from megarl.sandbox.sandbox import Case, Outcome, Program, Sandbox
from megarl.sandbox.tiers import open_sandbox

MAX_TEXT_BYTES = 2**29
"""Bytes of the test cases of a row after decompression, at most."""

TEXT_OPCODES = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
OTHER_OPCODES = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}
"""Instructions of a pickle that is one text: none of them builds an object or calls a function."""

STDIN_TYPES = {None, "stdin", "stdin_stdout", "stdio"}
FUNCTION_TYPES = {"functional", "function_call"}

PRINTED = Tolerance(relative=1e-6, absolute=1e-6)
"""Tolerance of printed numbers, of problems whose outputs have decimals; that of most judges."""

RETURNED = Tolerance(relative=1e-9, absolute=1e-5)
"""Tolerance of returned numbers where the expected one has decimals; that of LeetCode."""

PRELUDE = "\n".join(
    [
        *("from typing import *", "from collections import *", "from functools import *", "from itertools import *"),
        *("from heapq import *", "from bisect import *", "from math import *"),
        "import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys",
    ]
)
"""Names that programs with a function of a given name use without an import, as on the sites of their problems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An input and an output as a row has them, before they become a test case."""

    where: str
    given: Any
    expected: Any
    function: object = None
    """Name of the function that gets the input as its arguments, unchecked; None: the program reads it from stdin."""
    is_call: bool = False
    """The input is an expression to evaluate."""
    others: tuple[Any, ...] = ()
    """Outputs that are accepted beside the expected one."""


def parse_text(text: str, where: str) -> Any:
    """Return what a text stands for: JSON, or JSON in zlib and base64, which a pickle may wrap.

    Nothing is unpickled: a pickle needs to be one text.

    Raises:
        TestCaseError: it is none of these.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        decompressor = zlib.decompressobj()
        data = decompressor.decompress(base64.b64decode(text, validate=True), MAX_TEXT_BYTES)
        inner = json.loads(data) if data[:1] in b"[{" else _pickled_text(data)
        return json.loads(inner) if isinstance(inner, str) else inner
    except (ValueError, binascii.Error, zlib.error, RecursionError, IndexError) as e:
        raise TestCaseError(
            f"{where} needs JSON, or JSON in zlib and base64, got {text[:80]!r} ({type(e).__name__}: {str(e)[:80]})"
        ) from None


def _pickled_text(data: bytes) -> str:
    texts = list[str]()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in TEXT_OPCODES:
            texts.append(str(argument))
        elif opcode.name not in OTHER_OPCODES:
            raise ValueError(f"a pickle of anything but a text, {opcode.name}")
    (text,) = texts
    return text


def find_pairs(value: Any, where: str, function: str | None = None) -> Iterator[Pair]:
    """Yield the inputs and outputs of a value in one of the published forms.

    Args:
        value: `[{input, output}, ...]` or `[{call, expected}, ...]`, where `accepted` may name a list of outputs;
            `{inputs, outputs}` or `{input, output}` with lists, perhaps with `fn_name`; such a value
            below `test_cases` or `ground_truth`; or a text with any of them.
        where: name of the field.
        function: function to call unless the value names one.

    Raises:
        TestCaseError: the value has another form.
    """
    match value:
        case str():
            yield from find_pairs(parse_text(value, where), where, function)
        case list():
            for i, item in enumerate(value):
                yield _pair(item, f"{where}[{i}]", function)
        case {"language": str(language)} if language.lower() not in ("python", "python3"):
            raise TestCaseError(f"{where} needs programs in Python, its language is {language[:80]!r}")
        case {"test_cases": inner} | {"ground_truth": inner}:
            yield from find_pairs(inner, where, function)
        case {"inputs": list(inputs), "outputs": list(outputs)} | {"input": list(inputs), "output": list(outputs)}:
            if len(inputs) != len(outputs):
                raise TestCaseError(f"{where} needs one output per input, got {len(outputs)} for {len(inputs)}")
            name = value.get("fn_name") or function
            for i, (given, expected) in enumerate(zip(inputs, outputs, strict=True)):
                yield Pair(where=f"{where}[{i}]", given=given, expected=expected, function=name)
        case _:
            raise TestCaseError(f"{where} needs inputs and outputs, got {str(value)[:80]!r}")


def _pair(item: Any, where: str, function: str | None) -> Pair:
    match item:
        case {"call": str(call), "expected": expected}:
            return Pair(where=where, given=_expression(call, where), expected=expected, is_call=True)
        case {"accepted": [first, *others], **rest}:
            return replace(_pair({**rest, "output": first, "expected": first}, where, function), others=tuple(others))
        case {"input": given, "output": expected}:
            kind = item.get("type") or item.get("testtype") or None
            name = item.get("fn_name") or function_name(item.get("metadata")) or function
            if kind is not None and not isinstance(kind, str):
                raise TestCaseError(f"{where} needs a text as its type, got {str(kind)[:80]!r}")
            if kind in STDIN_TYPES and not (kind is None and name):
                return Pair(where=where, given=given, expected=expected)
            if kind is not None and kind not in FUNCTION_TYPES:
                raise TestCaseError(f"{where} needs the type stdin or functional, got {kind[:80]!r}")
            if name is None:
                raise TestCaseError(f"{where} needs the name of the function that its input is for")
            return Pair(where=where, given=given, expected=expected, function=name)
        case _:
            raise TestCaseError(f"{where} needs {{input, output}} or {{call, expected}}, got {str(item)[:80]!r}")


def _expression(source: str, where: str) -> str:
    try:
        ast.parse(source.strip(), mode="eval")
    except NO_PYTHON:
        raise TestCaseError(f"{where} needs an expression in 'call', got {source[:80]!r}") from None
    return source.strip()


def function_name(metadata: Any) -> str | None:
    """Return `func_name` of a row's or a case's metadata, which may be JSON text."""
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError):
            return None
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else None


def to_cases(pairs: Sequence[Pair]) -> list[TestCase]:
    """Return the test cases of a row's inputs and outputs.

    Raises:
        TestCaseError: an input or an output is no text where the program reads and prints, or has no arguments.
    """
    texts = [_text(pair.expected, pair.where) for pair in pairs if pair.function is None and not pair.is_call]
    tolerance = PRINTED if any(map(prints_fractions, texts)) else None
    # APPS wraps each output in a list; whether it did is not recorded, so that both readings are accepted
    wrapped = all(isinstance(pair.expected, list) and len(pair.expected) == 1 for pair in pairs)
    return [_to_case(pair, tolerance, wrapped=wrapped) for pair in pairs]


def _to_case(pair: Pair, tolerance: Tolerance | None, *, wrapped: bool) -> TestCase:
    if pair.is_call:
        return TestCase(case=Case(call=pair.given), expected=pair.expected, others=pair.others, as_json=True)
    if pair.function is not None:
        return _call(pair, wrapped=wrapped)
    return TestCase(
        case=Case(stdin=_text(pair.given, pair.where)),
        expected=_text(pair.expected, pair.where),
        others=tuple(_text(other, pair.where) for other in pair.others),
        tolerance=tolerance,
    )


def text_of_lines(value: Any, needs: str) -> str:
    """Return a text that may be a list of its lines.

    Raises:
        TestCaseError: it is neither; the message begins with `needs`.
    """
    match value:
        case str():
            return value
        case list() if all(isinstance(line, str) for line in value):
            return "\n".join(value)
        case _:
            raise TestCaseError(f"{needs}, got {str(value)[:80]!r}")


def _text(value: Any, where: str) -> str:
    return text_of_lines(value, f"{where} needs texts as the input and the output")


def _call(pair: Pair, *, wrapped: bool) -> TestCase:
    arguments, expected = pair.given, pair.expected
    if isinstance(arguments, str):  # one argument as JSON per line
        arguments = [parse_text(line, pair.where) for line in arguments.split("\n") if line.strip()]
        expected = parse_text(expected, pair.where) if isinstance(expected, str) else expected
    if not isinstance(arguments, list):
        raise TestCaseError(f"{pair.where} needs a list of arguments, got {str(arguments)[:80]!r}")
    name = pair.function
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise TestCaseError(f"{pair.where} needs the name of a function, got {str(name)[:80]!r}")
    inputs = ", ".join(repr(_with_int_keys(argument)) for argument in arguments)
    return TestCase(
        case=Case(call=f"(Solution().{name} if 'Solution' in globals() else {name})({inputs})"),
        expected=expected,
        others=(*pair.others, *(expected if wrapped else ())),
        tolerance=RETURNED if _has_fraction(expected) else None,
        as_json=True,
    )


def _with_int_keys(value: Any) -> Any:
    """Return an argument with integers as the keys of a mapping where JSON has made texts of all of them."""
    if isinstance(value, dict) and value and all(key.lstrip("-").isdecimal() for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _has_fraction(value: Any) -> bool:
    match value:
        case float():
            return True
        case list():
            return any(map(_has_fraction, value))
        case dict():
            return any(map(_has_fraction, value.values()))
    return False


LAYOUTS = (
    ("test_list",),  # MBPP
    ("test",),  # HumanEval, HumanEval+
    ("input_output",),  # APPS, TACO
    ("public_test_cases", "private_test_cases"),  # LiveCodeBench
    ("public_tests", "private_tests", "generated_tests"),  # CodeContests
    ("tests",),  # DeepCoder
    ("test_cases",),
    ("official_tests",),  # open-r1's Codeforces
    ("verification_info",),  # PrimeIntellect, open-r1
    ("reward_model",),  # Eurus 2
)
"""Fields of test cases, by data set; the first layout of which a row has a field counts."""

SETUP_FIELDS = ("test_imports", "test_setup_code")
PYTHON3 = 3
"""Number of the language of solutions in CodeContests."""

FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)

EVALUATION_SECONDS = 60.0
"""CPU time for reading the expected values of a row."""

Evaluate = Callable[[Program], Sequence[Outcome]]
"""Runs a program in a sandbox that never runs programs of the policy."""


class ReferenceSandbox:
    """Evaluates expected outputs, in a sandbox that never runs programs of the policy and opens with its first use."""

    def __init__(self, config: SandboxConfig, *, key: str) -> None:
        """Create the sandbox; arguments as for `open_sandbox`."""
        limits = {"output_kib": 2**14, "memory_mib": max(1024, config.memory_mib), "cpu_seconds": 30}
        self._config = config.model_copy(update={**limits, "wall_seconds": max(60.0, config.wall_seconds)})
        self._key = key
        self._sandbox: Sandbox | None = None

    def run(self, program: Program) -> Sequence[Outcome]:
        """Return the outcomes of the program's cases.

        Raises:
            ConfigError: no sandbox works on this machine.
            SandboxError: the sandbox could not be started or was lost.
        """
        if self._sandbox is None:
            self._sandbox = open_sandbox(self._config, key=self._key)
        return self._sandbox.run(program)

    def close(self) -> None:
        """Release the sandbox, if it was opened."""
        if self._sandbox is not None:
            self._sandbox.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTests:
    """The test cases of a row, and the sources around a program that is tested."""

    cases: list[TestCase]
    prefix: str = ""
    """Source before a program."""
    setup: str = ""
    """Source that is executed after a program, before calls."""

    def make_program(self, source: str) -> Program:
        """Return a program with the inputs of the test cases, and without their expected outputs."""
        return Program(
            source=_join(self.prefix, source),
            setup=self.setup,
            cases=[test.case for test in self.cases],
            output_bytes=output_bytes(self.cases),
        )


def load_tests(row: Mapping[str, Any], config: CodeRewardConfig, evaluate: Evaluate) -> RowTests:
    """Return the test cases of a row.

    Args:
        row: the row.
        config: section of the reward term.
        evaluate: runs what has to be evaluated to get an expected output that is no literal.

    Raises:
        TestCaseError: the row has no test cases, or one whose expected output cannot be told apart from its input.
        SandboxError: an expected output could not be evaluated, since there was no sandbox.
    """
    try:
        return _load_tests(row, config, evaluate)
    except RecursionError:
        raise TestCaseError("needs test cases that are not nested so deeply") from None


def _load_tests(row: Mapping[str, Any], config: CodeRewardConfig, evaluate: Evaluate) -> RowTests:
    fields = _test_fields(row, config.tests_field)
    setup = _parse_setup(row, config.setup_field)
    first = row[fields[0]]
    if isinstance(first, str) and "def check(" in first:
        entry_point = row.get("entry_point")
        if not isinstance(entry_point, str):
            raise TestCaseError(f"needs the name of a function in 'entry_point', got {str(entry_point)[:80]!r}")
        found = parse_check_function(first, entry_point, fields[0])
        prefix = _python_prompt(row.get("prompt"))
        return _evaluated(found, row, config, prefix, setup, evaluate, entry_point)
    if isinstance(first, list) and first and all(isinstance(test, str) for test in first):
        found = parse_assertions(first, fields[0])
        return _evaluated(found, row, config, "", setup, evaluate)
    return _parse_cases(row, fields, setup)


def find_solution(row: Mapping[str, Any], field: str | None) -> str | None:
    """Return a reference solution of a row, which goes where a program of the policy does; None: it has none.

    Args:
        row: the row.
        field: its field; `auto`: `code`, `canonical_solution`, or the first of `solutions`.
    """
    if field is None:
        return None
    for name in ("code", "canonical_solution", "solutions") if field == AUTO else (field,):
        match row.get(name):
            case str(source) if name != "solutions":
                return source
            case str(source):
                try:
                    return next((s for s in parse_text(source, name) if isinstance(s, str)), None)
                except (TestCaseError, TypeError):
                    return None
            case {"language": list(languages), "solution": list(sources)}:
                return next((s for n, s in zip(languages, sources, strict=False) if n == PYTHON3), None)
            case [str(source), *_]:
                return source
    return None


def _test_fields(row: Mapping[str, Any], field: str) -> list[str]:
    """Return the fields with a row's test cases that are not empty."""
    layouts = LAYOUTS if field == AUTO else ((field,),)
    for layout in layouts:
        if found := [name for name in layout if row.get(name)]:
            return found
    for name in (name for layout in layouts for name in layout):
        if field != AUTO or name in row:
            raise TestCaseError(f"needs test cases in {name!r}, got {str(row.get(name))[:80]!r}")
    names = ", ".join(name for layout in LAYOUTS for name in layout)
    raise TestCaseError(f"needs test cases in a field of a published layout ({names}), or in tests_field")


def _parse_setup(row: Mapping[str, Any], field: str | None) -> str:
    names = SETUP_FIELDS if field == AUTO else (field,) if field is not None else ()
    given = {name: row[name] for name in names if row.get(name) is not None}
    sources = [
        text_of_lines(value, f"needs source or a list of its lines in {name!r}") for name, value in given.items()
    ]
    return "\n".join(filter(None, sources))


def _python_prompt(prompt: Any) -> str:
    """Return a prompt that is the beginning of the program, as in HumanEval; empty if it is a task in words."""
    if not isinstance(prompt, str):
        return ""
    try:
        statements = ast.parse(prompt).body
    except NO_PYTHON:
        return ""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return prompt if any(isinstance(statement, kinds) for statement in statements) else ""


def _evaluated(
    found: AssertionTests,
    row: Mapping[str, Any],
    config: CodeRewardConfig,
    prefix: str,
    setup: str,
    evaluate: Evaluate,
    entry_point: str = "",
) -> RowTests:
    """Return tests with the expected values of assertions, evaluated with the reference solution of the row."""
    cases = found.cases
    if cases is None:
        solution = find_solution(row, config.solution_field)
        if solution is not None:
            reference = _join(prefix, solution)
        else:  # the function of the prompt has no body
            reference = f"{prefix}\n{entry_point} = None" if entry_point.isidentifier() else prefix
        program = Program(source=reference, setup=f"{setup}\n{found.recording}", cases=[Case(call=f"{RECORDED}()")])
        (outcome,) = evaluate(program)
        if outcome.status != "ok" or not outcome.value:
            raise TestCaseError(f"expected values need to be evaluated without the program: {describe_end(outcome)}")
        try:
            cases = found.cases_of(read_value(outcome.value, GradingClock(EVALUATION_SECONDS)))
        except (UndecidedError, TypeError, *NO_PYTHON) as e:
            raise TestCaseError(f"expected values need to be literals: {str(e)[:200]}") from None
    return RowTests(cases=cases, prefix=prefix, setup="\n".join(filter(None, (found.imports, setup))))


def _parse_cases(row: Mapping[str, Any], fields: Sequence[str], setup: str) -> RowTests:
    """Return tests that are inputs and outputs."""
    function = function_name(row.get("metadata"))
    pairs = [pair for field in fields for pair in find_pairs(row[field], field, function)]
    if not pairs:
        raise TestCaseError(f"needs test cases in {fields[0]!r}, got none")
    has_function = any(pair.function is not None for pair in pairs)
    return RowTests(cases=to_cases(pairs), prefix=PRELUDE if has_function else "", setup=setup)


def _join(prefix: str, source: str) -> str:
    """Return prefix and program as one source; imports from `__future__` have to be first."""
    if not prefix:
        return source
    future = FUTURE.findall(source)
    return "\n".join([*future, prefix, FUTURE.sub("", source) if future else source])


logger = logging.getLogger(__name__)


class GradableRows:
    """Drops the rows that a term with `ungradable_rows: drop` cannot grade, and counts them."""

    def __init__(self, config: RunConfig) -> None:
        """Create the filter; starts no sandbox."""
        self._terms = {
            name: (term, ReferenceSandbox(term.sandbox, key=f"reward.terms.{name}.sandbox"))
            for name, term in config.reward.terms.items()
            if isinstance(term, CodeRewardConfig) and term.ungradable_rows == "drop"
        }
        self._dropped = Counter[str]()

    def of_source(self, source: Source) -> Callable[[Row], bool] | None:
        """Return the function that tells whether a row of a source is kept; None: all are."""
        names = source.config.reward_terms
        terms = [each for name, each in self._terms.items() if names is None or name in names]

        def is_kept(row: Row) -> bool:
            try:
                for term, references in terms:
                    load_tests(row.fields, term, references.run)
            except TestCaseError as e:
                self._dropped[str(row.path)] += 1
                logger.info("%s: dropped, since it cannot be graded: %s", row.where, e)
                return False
            return True

        return is_kept if terms else None

    def close(self) -> None:
        """Log how many rows were dropped, and release the sandboxes."""
        for path, num_dropped in self._dropped.items():
            logger.warning("%s: dropped %d rows that cannot be graded (megarl check names them)", path, num_dropped)
        for _, references in self._terms.values():
            references.close()
