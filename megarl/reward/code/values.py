"""Values of a program's calls, read from the text that comes out of its sandbox.

A program may forge the text so that reading it is expensive: the cost is bounded, and no code in it is executed.
"""

from __future__ import annotations

import ast
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

GRADING_SECONDS = 1.0
"""CPU time for one test case."""

MAX_COLLISIONS = 64
"""Members of a set, or keys of a dict, that may have one hash; adding n of them takes n * n comparisons."""

CONSTRUCTORS: Mapping[str, Callable[..., Any]] = {
    "Decimal": Decimal,
    "Fraction": Fraction,
    "frozenset": frozenset,
    "set": set,
}
"""Calls in texts of values, on literals."""


class UndecidedError(Exception):
    """A test case takes more CPU time to grade than it may."""


class GradingClock:
    """Counts the CPU time of this thread for one test case."""

    def __init__(self, seconds: float | None = None) -> None:
        self._deadline = time.thread_time() + (GRADING_SECONDS if seconds is None else seconds)

    def check(self) -> None:
        """Return while there is time.

        Raises:
            UndecidedError: there is none left.
        """
        if time.thread_time() > self._deadline:
            raise UndecidedError


def read_value(text: str, clock: GradingClock) -> Any:
    """Return the value of a text that `megarl.sandbox.guest.program` has written.

    Raises:
        UndecidedError: it takes too long.
        Exception: of any kind, as the text is no value.
    """
    return _read(ast.parse(text.strip(), mode="eval").body, clock)


def _read(node: ast.expr, clock: GradingClock) -> Any:
    clock.check()
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id="nan" | "inf" as name):
            return float(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_read_number(operand, clock)
        case ast.BinOp(left=left, op=ast.Add(), right=right):  # a complex number
            return _read_number(left, clock) + _read_number(right, clock)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _read_number(left, clock) - _read_number(right, clock)
        case ast.Tuple(elts=items):
            return tuple(_read(item, clock) for item in items)
        case ast.List(elts=items):
            return [_read(item, clock) for item in items]
        case ast.Set(elts=items):
            return set(_hashed(_read(item, clock) for item in items))
        case ast.Dict(keys=keys, values=values) if None not in keys:
            found = _hashed(_read(key, clock) for key in keys if key is not None)
            return dict(zip(found, (_read(value, clock) for value in values), strict=True))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in CONSTRUCTORS:
            return CONSTRUCTORS[name](*(_read(argument, clock) for argument in arguments))
    raise ValueError(f"a value needs to be a literal, got {type(node).__name__}")


def _read_number(node: ast.expr, clock: GradingClock) -> Any:
    value = _read(node, clock)
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        raise ValueError(f"a number needs to be a literal, got {type(value).__name__}")  # noqa: TRY004
    return value


def _hashed(items: Iterable[Hashable]) -> list[Hashable]:
    """Return the members of a set, or the keys of a dict.

    Raises:
        UndecidedError: too many of them have one hash.
    """
    found = list(items)
    if max(Counter(map(hash, found)).values(), default=0) > MAX_COLLISIONS:
        raise UndecidedError
    return found
