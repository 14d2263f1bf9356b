"""Forms in which data sets publish inputs and outputs, read as they are: lists, JSON text, or compressed text."""

from __future__ import annotations

import ast
import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.reward.code.assertions import NO_PYTHON, TestCaseError
from megarl.reward.code.comparison import Tolerance, prints_fractions
from megarl.reward.code.grading import TestCase
from megarl.sandbox.sandbox import Case

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
