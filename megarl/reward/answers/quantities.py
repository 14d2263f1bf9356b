"""Reads a written answer as an exact number with a unit; arithmetic that is not carried out is no number."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import regex

from megarl.reward.answers.answer_text import clean_answer, is_enclosed, split_outside
from megarl.reward.answers.arithmetic import evaluate
from megarl.reward.answers.units import Unit, are_compatible, read_unit, strip_units

MAX_NUMBER_LENGTH = 200
"""Maximum number of characters of a quantity; an untrained policy may write thousands of digits."""

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:[ '_][0-9]{3})+|[0-9]+)(?![0-9])"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"10\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?\s*[0-9]{1,3})\s*\}|([-+]?[0-9]{1,3})(?![0-9]))"
_PATTERNS = tuple(
    (kind, regex.compile(pattern))
    for kind, pattern in (
        ("power", rf"({_DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*{_POWER}"),
        ("power", rf"({_DECIMAL})[eE]()([-+]?[0-9]{{1,3}})(?![0-9])"),
        ("power", rf"(){_POWER}"),
        ("repeating", r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{([0-9]+)\}"),
        (
            "fraction",
            rf"({_INTEGER})?()\s*\\frac\s*\{{\s*([-+]?\s*{_INTEGER})\s*\}}\s*\{{\s*([-+]?\s*{_INTEGER})\s*\}}",
        ),
        ("fraction", r"([0-9]+)(?: |-| and |\s*\\text\s*\{ ?and ?\}\s*)()([0-9]+)\s*/\s*([0-9]+)(?![0-9.])"),
        ("fraction", r"([0-9]+)\s*\\text\s*\{\s*and\s*\}\s*()\\frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"),
        ("fraction", r"()\{?()([0-9]+)\}?\s*/\s*\{?([0-9]+)(?![0-9.])\}?"),
        ("decimal", rf"({_DECIMAL})"),
    )
)
_SIGN = regex.compile(r"([-+]?)\s*")
_CURRENCY = regex.compile(r"(?:(USD|EUR|GBP|INR|JPY|CNY|US USD|Rs\.?|[€£¥₹₩₽])\s*)?([-+]?)\s*")
_MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MAGNITUDE = regex.compile(
    rf"\s*(?:\\text\s*\{{)?\s*({'|'.join(_MAGNITUDES)})s?(?![A-Za-z])(\s*\}})?", regex.IGNORECASE
)
_RELATION = r"(?<![<>!])=|\\approx(?![A-Za-z])"
_NAME = regex.compile(
    r"(?:\\?[A-Za-z]+|[A-Z]+)(?:_(?:[A-Za-z0-9]|\{[^{}]*\})|\^?'+|\^\{?\\prime\}?)*\s*(?:\((?:[^()]*)\))?"
    r"|\\text\s*\{[^{}0-9]*\}(?:_(?:[A-Za-z0-9]|\{[^{}]*\}))?|\\(?:vec|overline|hat|bar)\s*\{[A-Za-z]+\}|\\frac\{d[a-z]\}\{d[a-z]\}"
    r"|\|[A-Za-z ]+\||(?:m ?)?\\angle ?[A-Za-z]+|[A-Za-z ']+:?"
)
_NAMES = regex.compile(r"(?![-+]|.*\\(?:le|ge|ne|pm|in|to|cup)\b)(?:_[0-9]|_\{[^{}]*\}|[^0-9<>,;])++")


@dataclass(frozen=True, slots=True)
class Quantity:
    """An exact number; `unit` is None without a unit, and for words that are no unit of measurement (18 apples)."""

    value: Fraction
    unit: Unit | None = None
    name: str = ""
    """The variable that it is assigned to, a single letter or command."""

    def equals(self, other: Quantity) -> bool:
        """Whether numbers are equal, and units and names are where both have one."""
        if self.value != other.value or (self.name and other.name and self.name != other.name):
            return False
        return are_compatible(self.unit, other.unit)


def is_name(text: str) -> bool:
    """Whether a side of an equation is the name of a quantity, such as `x`, `f(2)` or a text."""
    return _NAME.fullmatch(text) is not None and evaluate(text) is None


def is_sum_of_names(text: str) -> bool:
    """Whether a side of an equation is made of names without numbers, such as `x + y`."""
    return _NAMES.fullmatch(text) is not None


def parse_number(answer: str) -> Fraction | None:
    r"""Return the exact value of a written number, with or without a unit, or None for any other text.

    Accepts separators of thousands, decimals, fractions (`1/2`, `3 1/2`, `\frac{1}{2}`), repeating decimals and powers
    of ten. A sum is not a number: the policy must compute it.
    """
    quantity = read_quantity(clean_answer(answer)) if len(answer) <= MAX_NUMBER_LENGTH else None
    return None if quantity is None else quantity.value


def read_quantities(text: str, *, is_reference: bool = False) -> list[Quantity]:
    r"""Return the numbers that a cleaned answer states: one, two for `\frac13 \approx 0.33`, none for other texts.

    In a chain such as `x = 3 \cdot 4 = 12` the last side is the answer. All sides without variables need to agree:
    exactly at `=`, and at `\approx` to the digits of the rounded number.

    Args:
        text: the cleaned answer.
        is_reference: sides that are no plain names make an equation, as `x + y = 5`, and no number.
    """
    if len(text) > MAX_NUMBER_LENGTH:
        return []
    stated: list[Quantity] = []
    name = ""
    exact: Fraction | float | None = None
    parts = [split_outside(part, r"(?<![<>!])=") for part in split_outside(text, r"\\approx(?![A-Za-z])")]
    for i, sides in enumerate(parts):
        last: Quantity | None = None
        values: list[Fraction | float] = []
        for j, side in enumerate(sides):
            last = read_quantity(side)
            if last is not None:
                values.append(last.value)
            elif not side and i == j == 0:
                continue
            elif is_name(side):
                name = side if regex.fullmatch(r"[A-Za-z]|\\[a-z]+", side) else ""
            elif (value := evaluate(strip_units(side))) is not None:
                values.append(value)
            elif is_reference or not is_sum_of_names(side):
                return []
        if any(not _agree(value, values[-1]) for value in values):
            return []
        if exact is not None and (last is None or not _rounds_to(exact, last.value, sides[-1])):
            return []
        if last is not None:
            stated.append(Quantity(last.value, last.unit, name))
        exact = values[-1] if values else None
    return stated if last is not None else []


def read_quantity(text: str) -> Quantity | None:
    """Return a cleaned text as a number with an optional unit; None for any other text, and for arithmetic."""
    while is_enclosed(text, "(", ")") or is_enclosed(text, "{", "}"):
        text = text[1:-1].strip()
    sign = _SIGN.match(text)
    assert sign is not None
    currency = _CURRENCY.match(text, sign.end())
    assert currency is not None
    if sign[1] and currency[2]:
        return None
    if is_enclosed(text[currency.end() :], "(", ")"):
        inner = read_quantity(text[currency.end() :])
        if inner is None or text[currency.end() + 1 :].lstrip().startswith(("-", "+")):
            return None
        return Quantity(-inner.value if "-" in (sign[1], currency[2]) else inner.value, inner.unit)
    for kind, pattern in _PATTERNS:
        match = pattern.match(text, currency.end())
        value = None if match is None else _read_value(kind, [group or "" for group in match.groups()])
        if match is None or value is None:
            continue
        rest = text[match.end() :]
        if magnitude := _MAGNITUDE.match(rest):
            value *= 10 ** _MAGNITUDES[magnitude[1].lower()]
            rest = (
                rest[magnitude.end() :]
                if magnitude[2] or "{" not in magnitude[0]
                else "\\text{" + rest[magnitude.end() :]
            )
        unit = read_unit(rest, currency[1] or "")
        if unit is not None:
            return Quantity(-value if "-" in (sign[1], currency[2]) else value, unit or None)
    return None


def _read_value(kind: str, groups: list[str]) -> Fraction | None:
    groups = [regex.sub(r"[ ,'_]", "", group) for group in groups]
    if kind == "decimal":
        return Fraction(groups[0].removesuffix("."))
    if kind == "power":
        return Fraction((groups[0] or "1").removesuffix(".")) * Fraction(10) ** int(groups[1] or groups[2])
    if kind == "repeating":
        whole, start, period = groups
        scale = 10 ** len(start)
        return Fraction(int(whole + start or "0"), scale) + Fraction(int(period), (10 ** len(period) - 1) * scale)
    whole, _, numerator, denominator = groups
    if int(denominator) == 0:
        return None
    part = Fraction(int(numerator), int(denominator))
    if whole and not 0 <= part < 1:
        return None
    return part + int(whole or "0")


def _agree(value: Fraction | float, other: Fraction | float) -> bool:
    """Whether two sides are equal: exactly if both are rational, else to 12 digits."""
    if isinstance(value, Fraction) and isinstance(other, Fraction):
        return value == other
    try:
        value, other = float(value), float(other)
    except OverflowError:
        return False
    return abs(value - other) <= 1e-12 * max(abs(value), abs(other), 1e-300)


def _rounds_to(value: Fraction | float, rounded: Fraction, written: str) -> bool:
    """Whether `rounded`, as it is written, is `value` rounded or cut off at its last digit."""
    digits = regex.search(r"\.([0-9]+)", written)
    step = Fraction(1, 10 ** len(digits[1])) if digits else Fraction(1)
    difference = abs(Fraction(value)) - abs(rounded)
    return abs(difference) <= step / 2 or 0 <= difference < step
