r"""Carries out written arithmetic, to check the other sides of an answer such as `3 \cdot 4 = 12`."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import regex

Number = Fraction | float
"""Rational numbers are exact; roots, logarithms and angles are floats."""

MAX_BITS = 4096
"""Size of a number beyond which arithmetic is not carried out."""

MAX_DEPTH = 40
"""Deepest nesting of brackets, signs and functions that is read."""

_LEXEME = regex.compile(
    r"\s*(?:([0-9]+(?:,[0-9]{3})*(?:\.[0-9]*)?|\.[0-9]+)|(\\[A-Za-z]+|\*\*|[-+*/^(){}!|,\[\]_]|×|x))"
)
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "\\sin": math.sin, "\\cos": math.cos, "\\tan": math.tan, "\\ln": math.log, "\\exp": math.exp,
    "\\arcsin": math.asin, "\\arccos": math.acos, "\\arctan": math.atan,
}  # fmt: skip


class _Unreadable(Exception):  # noqa: N818 -- control flow inside this module
    """The text is no arithmetic of numbers."""


def evaluate(text: str) -> Number | None:
    """Return the value of a cleaned expression without variables; None for other texts and for huge numbers."""
    tokens, at = list[str](), 0
    text = text.strip()
    while at < len(text):
        match = _LEXEME.match(text, at)
        if match is None or len(tokens) > 200:
            return None
        tokens.append(
            match[1]
            or {"**": "^", "×": "*", "x": "*", "\\times": "*", "\\cdot": "*", "\\div": "/"}.get(match[2], match[2])
        )
        at = match.end()
    reader = _Reader(tokens)
    try:
        value = reader.sum()
    except (_Unreadable, ArithmeticError, ValueError):
        return None
    return value if reader.at == len(tokens) and (isinstance(value, Fraction) or math.isfinite(value)) else None


class _Reader:
    """Reads tokens by recursive descent, to a depth of `MAX_DEPTH`."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self.at = 0
        self._depth = 0

    def sum(self) -> Number:
        """Return the value of terms with + and - between them."""
        total = self._product()
        while self._peek() in ("+", "-"):
            sign = self._take()
            term = self._product()
            total = _bounded(total + term if sign == "+" else total - term)
        return total

    def _product(self) -> Number:
        value = self._signed()
        while (lexeme := self._peek()) not in ("", "+", "-", ")", "}", "]", ",", "|"):
            if lexeme in ("*", "/"):
                self._take()
            factor = self._signed() if lexeme in ("*", "/") else self._power()
            value = _bounded(value / factor if lexeme == "/" else value * factor)
        return value

    def _signed(self) -> Number:
        return self._deeper(self._signed_at_depth)

    def _signed_at_depth(self) -> Number:
        if self._peek() in ("+", "-"):
            return -self._signed() if self._take() == "-" else self._signed()
        return self._power()

    def _power(self) -> Number:
        base = self._atom()
        while self._peek() in ("!", "^"):
            if self._take() == "!":
                base = Fraction(math.factorial(_integer(base, 200)))
            elif self._peek() == "\\circ":
                self._take()
                base = math.radians(base)
            else:
                base = _raise(base, self._group(self._signed))
        return base

    def _atom(self) -> Number:
        return self._deeper(self._atom_at_depth)

    def _atom_at_depth(self) -> Number:
        lexeme = self._take()
        if lexeme[:1].isdigit() or lexeme[:1] == ".":
            return Fraction(lexeme.replace(",", "").removesuffix("."))
        if lexeme in ("(", "{", "|"):
            value = self.sum()
            self._expect({"(": ")", "{": "}", "|": "|"}[lexeme])
            return -value if lexeme == "|" and value < 0 else value
        if lexeme == "\\frac":
            return _bounded(self._group() / self._group())
        if lexeme == "\\binom":
            return Fraction(math.comb(_integer(self._group(), 200), _integer(self._group(), 200)))
        if lexeme == "\\sqrt":
            index = Fraction(2)
            if self._peek() == "[":
                self._take()
                index = Fraction(_integer(self.sum(), 64))
                self._expect("]")
            return _raise(self._group(), 1 / index)
        if lexeme == "\\pi":
            return math.pi
        if lexeme in ("\\log", "\\lg"):
            base: Number = Fraction(10)
            if self._peek() == "_":
                self._take()
                base = self._group()
            return math.log(self._power(), base)
        if lexeme in _FUNCTIONS:
            return _FUNCTIONS[lexeme](float(self._power()))
        raise _Unreadable(lexeme)

    def _group(self, otherwise: Callable[[], Number] | None = None) -> Number:
        """Return the value in the next braces, or of the next number."""
        return self._atom() if self._peek() == "{" or otherwise is None else otherwise()

    def _deeper(self, read: Callable[[], Number]) -> Number:
        if self._depth == MAX_DEPTH:
            raise _Unreadable("too deep")
        self._depth += 1
        value = read()
        self._depth -= 1
        return value

    def _peek(self) -> str:
        return self._tokens[self.at] if self.at < len(self._tokens) else ""

    def _take(self) -> str:
        lexeme = self._peek()
        self.at += 1
        return lexeme

    def _expect(self, lexeme: str) -> None:
        if self._take() != lexeme:
            raise _Unreadable(lexeme)


def _raise(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            size = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent)
            return base ** int(exponent) if size <= MAX_BITS else _bounded(math.inf)
        root = _exact_root(base, exponent.denominator)
        if root is not None:
            return _raise(root, Fraction(exponent.numerator))
    if base < 0:
        raise _Unreadable("a root of a negative number")
    return _bounded(math.pow(base, exponent))


def _exact_root(value: Fraction, index: int) -> Fraction | None:
    if value < 0:
        return None
    parts = [round(float(part) ** (1 / index)) for part in (value.numerator, value.denominator)]
    root = Fraction(parts[0], parts[1] or 1)
    return root if abs(root.numerator) < 1 << 53 and root**index == value else None


def _integer(value: Number, maximum: int) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= maximum:
        raise _Unreadable(str(float(value)))
    return int(value)


def _bounded(value: Number) -> Number:
    """Return the value.

    Raises:
        _Unreadable: it is no finite number of at most `MAX_BITS`.
    """
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise _Unreadable("too large")
    elif not math.isfinite(value):
        raise _Unreadable("not finite")
    return value
