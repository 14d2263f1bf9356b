"""The child process of `math_equivalence.py`: compares answers with sympy, each comparison in a process of its own.

It reads lines of JSON on stdin, and writes a word for each to stdout. For each line it forks a process, which has sympy
loaded, compares the two structures of `answer_structure.py`, and ends with an exit code for the result. Signals end
that process when its CPU time is over, which also works within a long computation in C.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

MEMORY_BYTES = 2 << 30
"""Memory limit of a comparison."""

MAX_BITS = 1 << 18
"""Size of a number that is computed."""

NUM_DIGITS = 60
"""Digits to which values are computed to see that they differ; values that agree need a proof."""

EXIT_CODES = {"equal": 0, "unequal": 10, "unreadable prediction": 11, "unreadable reference": 12, "undecided": 13}


class _TooLargeError(Exception):
    """A number has more than `MAX_BITS`."""


def main() -> None:
    """Reply to each line of stdin until it is closed, which happens when the parent exits."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a stray print must not be taken for a reply
    logging.disable(logging.WARNING)
    _warm_up()
    words = {code: word for word, code in EXIT_CODES.items()}
    replies.write("ready\n")
    for line in sys.stdin:
        prediction, reference, cpu_seconds = json.loads(line)
        child = os.fork()
        if child == 0:
            _Comparison(cpu_seconds).run(prediction, reference)
        _, status = os.waitpid(child, 0)
        replies.write(words.get(os.waitstatus_to_exitcode(status), "undecided") + "\n")


def _warm_up() -> None:
    """Load what comparisons need, so that forked processes have it."""
    comparison = _Comparison(None)
    for texts in (
        ("\\sin^2 x+\\cos^2 x", "\\frac{1}{1}"),
        ("\\ln(2)+\\ln(3)", "\\ln 6"),
        ("\\sqrt{3+2\\sqrt{2}}", "1+\\sqrt{2}"),
    ):
        comparison.same(*(comparison.parse(["expression", text]) for text in texts))


class _Comparison:
    """Compares a prediction with a reference, and ends the process."""

    def __init__(self, cpu_seconds: float | None) -> None:
        self._stage = "unreadable reference"
        if cpu_seconds is None:
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = min(limit for limit in (MEMORY_BYTES, soft, hard) if limit != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        sys.excepthook = self._end_with
        sys.setrecursionlimit(2000)

    def run(self, prediction: Any, reference: Any) -> NoReturn:
        """Compare, and end with the exit code of the result."""
        wanted = self.parse(reference)
        self._stage = "unreadable prediction"
        got = self.parse(prediction)
        self._stage = "undecided"
        result = "equal" if self.same(got, wanted) else "unequal"
        os._exit(EXIT_CODES[result])

    def _end_with(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End with the exit code for an exception of latex2sympy or sympy."""
        limits = (MemoryError, RecursionError, _TooLargeError)
        os._exit(EXIT_CODES["undecided" if issubclass(kind, limits) else self._stage])

    def parse(self, structure: Any) -> Any:
        """Return the structure with sympy's expressions in place of texts."""
        kind, *parts = structure
        if kind == "expression":
            return [kind, _parse_expression(parts[0])]
        if kind == "relation":
            return [kind, [_parse_expression(side) for side in parts[0]], parts[1]]
        if kind == "named":
            return [kind, parts[0], self.parse(parts[1])]
        if kind == "matrix":
            return [kind, [[self.parse(cell) for cell in row] for row in parts[0]]]
        if kind == "reals":
            return structure
        return [kind, *parts[:-1], [self.parse(part) for part in parts[-1]]]

    def same(self, got: Any, wanted: Any) -> bool:
        """Whether two parsed structures are equal."""
        if "named" in (got[0], wanted[0]):
            return self._same_named(got, wanted)
        if wanted[0] == "equal" or (got[0] == "equal" and len(got[1]) > 1):
            return self._same_equations(got, wanted)
        if got[0] == wanted[0] == "expression":
            return _are_equal(got[1], wanted[1])
        if got[0] == wanted[0] == "set":
            return self._same_sets(got[1], wanted[1])
        if got[0] == wanted[0] == "bracket":
            return got[1:3] == wanted[1:3] and self._same_items(got[3], wanted[3])
        if got[0] == wanted[0] == "matrix":
            rows = zip(got[1], wanted[1], strict=False)
            return len(got[1]) == len(wanted[1]) and all(self._same_items(*pair) for pair in rows)
        if {got[0], wanted[0]} == {"matrix", "bracket"}:
            one, other = (_as_vector(each) for each in (got, wanted))
            return one is not None and other is not None and self._same_items(one, other)
        if got[0] == wanted[0] == "relation" and self._same_relations(got, wanted):
            return True
        sets = [_as_real_set(each) for each in (got, wanted)]
        return None not in sets and bool(sets[0] == sets[1] or sets[0].symmetric_difference(sets[1]).is_empty)

    def _same_items(self, got: Sequence[Any], wanted: Sequence[Any]) -> bool:
        return len(got) == len(wanted) and all(self.same(a, b) for a, b in zip(got, wanted, strict=True))

    def _same_sets(self, got: Sequence[Any], wanted: Sequence[Any]) -> bool:
        """Whether each element has an equal one in the other set."""
        return all(any(self.same(a, b) for b in wanted) for a in got) and all(
            any(self.same(a, b) for a in got) for b in wanted
        )

    def _same_named(self, got: Any, wanted: Any) -> bool:
        if got[0] == wanted[0] and got[1] != wanted[1] and _is_symbol(got[1]) and _is_symbol(wanted[1]):
            return got[2][0] == wanted[2][0] == "expression" and self._same_equations(got, wanted)
        if "equal" in (got[0], wanted[0]):
            return self._same_equations(got, wanted)
        return self.same(*(each[2] if each[0] == "named" else each for each in (got, wanted)))

    def _same_equations(self, got: Any, wanted: Any) -> bool:
        """Whether two equations have the same solutions, up to a factor, or all sides of one equal an expression."""
        if wanted[0] not in ("equal", "named"):
            return got[0] == "equal" and all(self.same(side, wanted) for side in got[1])
        differences = [_as_difference(each) for each in (got, wanted)]
        if None in differences:
            return False
        from sympy import cancel, expand

        first, second = (expand(difference) for difference in differences)
        if first == 0 or second == 0:
            return bool(first == second)
        ratio = cancel(first / second)
        return bool(ratio.is_number and ratio != 0)

    def _same_relations(self, got: Any, wanted: Any) -> bool:
        """Whether two inequalities with one sign are equal up to a positive factor."""
        from sympy import cancel

        if len(got[2]) != 1 or len(wanted[2]) != 1:
            return False
        differences, signs = [], []
        for _, (left, right), (sign,) in (got, wanted):
            flip = sign in (">", ">=")
            differences.append(right - left if flip else left - right)
            signs.append({">": "<", ">=": "<="}.get(sign, sign))
        if differences[1] == 0:
            return False
        ratio = cancel(differences[0] / differences[1])
        return bool(signs[0] == signs[1] and ratio.is_number and (ratio > 0 or (signs[0] == "!=" and ratio != 0)))


def _parse_expression(text: str) -> Any:
    """Return sympy's expression, with real variables, i as the imaginary unit, and numbers of limited size."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy import Expr, I, Symbol, nan, zoo

    parsed = latex2sympy(
        text,
        is_real=None,
        convert_degrees=False,
        normalization_config=None,
        conversion_config=ConversionConfig(lowercase_symbols=False),
    )
    if not isinstance(parsed, Expr):
        raise TypeError(f"needs an expression, got {type(parsed).__name__}")
    _count_bits(parsed)
    names = {symbol: I if symbol.name == "i" else Symbol(symbol.name, real=True) for symbol in parsed.free_symbols}
    expression = parsed.subs(names, simultaneous=True).doit()
    if expression.has(nan, zoo):
        raise ValueError("has no value")
    return expression


def _count_bits(expression: Any) -> int:
    """Return a bound of the bits of a value.

    Raises:
        _TooLargeError: it has more than `MAX_BITS`.
    """
    from sympy import Add, Integer, Mul, Pow, Rational, binomial, factorial

    sizes = [_count_bits(argument) for argument in expression.args] if not expression.is_Atom else []
    bits = max(sizes, default=1)
    if isinstance(expression, Rational):
        bits = max(int(Integer(part)).bit_length() for part in (expression.p, expression.q))
    elif isinstance(expression, Pow) and expression.is_number:
        bits = sizes[0] << min(sizes[1], 64)
    elif isinstance(expression, factorial | binomial) and expression.is_number:
        bits = sizes[0] << min(sizes[0], 64)
    elif isinstance(expression, Mul):
        bits = sum(sizes)
    elif isinstance(expression, Add):
        bits += len(sizes)
    if bits > MAX_BITS:
        raise _TooLargeError
    return bits


def _are_equal(first: Any, second: Any) -> bool:
    """Whether two expressions are equal: values that differ in `NUM_DIGITS` digits are not; others need a proof."""
    from sympy import Rational, expand, nsimplify, simplify

    if first == second:
        return True
    difference = first - second
    if difference.is_Rational or difference.is_infinite:
        return bool(difference == 0)
    symbols = sorted(difference.free_symbols, key=str)
    for base in (Rational(7, 10), Rational(23, 9)):
        points = {symbol: base + Rational(k * k, 3 * k + 2) for k, symbol in enumerate(symbols)}
        value, size = (each.subs(points).evalf(NUM_DIGITS) for each in (difference, first))
        if value.is_number and value.is_finite and size.is_finite:
            scale = abs(size) if size != 0 else 1
            if abs(value) > scale * Rational(1, 10 ** (NUM_DIGITS // 2)):
                return False
    if expand(difference) == 0 or simplify(difference) == 0:
        return True
    return bool(nsimplify(difference).equals(0))


def _as_difference(structure: Any) -> Any:
    """Return left minus right side of an equation of two expressions; None for other structures."""
    if structure[0] == "named" and structure[2][0] == "expression":
        return _parse_expression(structure[1]) - structure[2][1]
    if structure[0] == "equal" and len(structure[1]) == 2 and all(side[0] == "expression" for side in structure[1]):
        return structure[1][0][1] - structure[1][1][1]
    return None


def _as_vector(structure: Any) -> list[Any] | None:
    """Return the elements of a tuple, row or column."""
    if structure[0] == "bracket":
        return list(structure[3]) if structure[1:3] == ["(", ")"] else None
    rows = structure[1]
    if all(len(row) == 1 for row in rows):
        return [row[0] for row in rows]
    return list(rows[0]) if len(rows) == 1 else None


def _as_real_set(structure: Any) -> Any:
    """Return a set of real numbers: of an interval, an inequality, numbers, or a combination; None for others."""
    from sympy import FiniteSet, Intersection, Interval, S, Union

    kind = structure[0]
    if kind == "reals":
        return S.Reals
    if kind == "bracket" and len(structure[3]) == 2 and structure[1] != ":":
        _, opening, closing, items = structure
        ends = [item[1] for item in items if item[0] == "expression" and item[1].is_extended_real and item[1].is_number]
        return Interval(*ends, opening == "(", closing == ")") if len(ends) == 2 else None
    if kind == "set":
        numbers = [item[1] for item in structure[1] if item[0] == "expression" and item[1].is_real]
        return FiniteSet(*numbers) if len(numbers) == len(structure[1]) else None
    if kind == "relation":
        return _solve_relation(structure)
    if kind in ("union", "intersection", "difference"):
        parts = [_as_real_set(part[2] if part[0] == "named" else part) for part in structure[1]]
        if None in parts:
            return None
        return (
            {"union": Union, "intersection": Intersection}[kind](*parts)
            if kind != "difference"
            else parts[0] - parts[1]
        )
    return None


def _solve_relation(structure: Any) -> Any:
    """Return the real solutions of inequalities of one variable alone on its side, as 1 < x <= 2; None for others."""
    from sympy import FiniteSet, Interval, S, oo

    _, sides, signs = structure
    found, variables = S.Reals, set()
    for left, right, sign in zip(sides, sides[1:], signs, strict=False):
        if left.is_number and right.is_Symbol:
            left, right, sign = right, left, {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(sign, sign)
        if not (left.is_Symbol and right.is_number and right.is_extended_real):
            return None
        variables.add(left)
        match sign:
            case "<" | "<=":
                found = found.intersect(Interval(-oo, right, True, sign == "<"))
            case ">" | ">=":
                found = found.intersect(Interval(right, oo, sign == ">", True))
            case _:
                found = found - FiniteSet(right)
    return found if len(variables) == 1 else None


def _is_symbol(name: str) -> bool:
    return len(name) == 1 or (name.startswith("\\") and name[1:].isalpha())


if __name__ == "__main__":
    main()
