"""Reads a written answer as an exact number with a unit; arithmetic that is not carried out is no number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import regex

from megarl.reward.answer_text import is_enclosed, split_outside

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


Unit: TypeAlias = tuple[tuple[str, int], ...]
"""Names of base units with their powers; empty: none, or words that are no unit of measurement."""

MAX_WORDS = 6
"""Maximum number of words after a number."""

_SPELLINGS = """
mm millimeter millimetre; cm centimeter centimetre; dm decimeter; m meter metre; km kilometer kilometre; in inch
inches; ft foot feet; yd yard; mi mile; um micrometer micron; nm nanometer; mg milligram; g gram gm; kg kilogram kilo;
t ton tonne; lb lbs pound; oz ounce; ml mL milliliter millilitre; cl centiliter; l L liter litre; gal gallon; ms
millisecond; s sec second; min minute; h hr hour; day; week wk; month; year yr; N newton; J joule; kJ kilojoule; W
watt; kW kilowatt; kWh; V volt; A amp ampere; ohm Omega; Pa pascal; kPa; atm; K kelvin; C celsius; F fahrenheit; Hz
hertz; kHz; MHz; mol mole; rad radian; degree deg; percent pct %; B byte; kB KB kilobyte; MB megabyte; GB gigabyte;
mph; kph; cal calorie; kcal; USD dollar buck; EUR euro €; GBP £; INR rupee ₹ Rs; JPY yen ¥; CNY yuan; cent ¢; peso;
ruble ₽; won ₩; acre; hectare ha; unit
""".replace("\n", " ")
_KNOWN = {word: words.split()[0] for words in _SPELLINGS.split(";") for word in words.split()}
_LONG = {word.lower(): name for word, name in _KNOWN.items() if len(word) > 1}

_CHANGING_WORDS = """
or and not is are was plus minus times squared cubed factorial if to than over divided negative pi sqrt sin cos tan log
ln exp mod inf infinity hundred thousand million billion trillion choose root i e x y z
"""
_NO_UNITS = frozenset(_CHANGING_WORDS.split())
"""Words that change the number before them."""

_FONT = regex.compile(r"\\text\s*\{([^{}]*)\}")
_WORD = regex.compile(r"[^\W\d_]+|[%€£¥₹₩₽¢]")
_EXPONENT = regex.compile(r"\s*(?:\^\s*\{?\s*(-?[0-9])\s*\}?|(?<=[a-z])([23])(?![0-9]))?")
_ORDINAL = regex.compile(r"\^?\s*\{?\s*(?:\\text\s*\{)?\s*(?:st|nd|rd|th)\s*\}?\}?", regex.IGNORECASE)
_CONNECTED = regex.compile(r"\s*(/|\\cdot(?![A-Za-z])|\*|\.|-|per(?![A-Za-z])|a(?=\s))?\s*")


def read_unit(text: str, currency: str = "") -> Unit | None:
    """Return the unit in the rest of a text after a number; None if the rest is no unit, and changes the number.

    Args:
        text: the cleaned text after the number.
        currency: the sign or code before the number.
    """
    money: Unit = ((_currency_of(currency), 1),) if currency else ()
    if not text.strip() or _ORDINAL.fullmatch(text):
        return money
    spaced = text.startswith((" ", "\\text"))
    text = (
        text.replace("^\\circ", " degree ")
        .replace("\\circ", " degree ")
        .replace("\\%", "%")
        .replace("\\Omega", " ohm ")
    )
    text = regex.sub(r"\\frac\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"\1 / \2", text)
    text = _FONT.sub(r" \1 ", text)
    text = regex.sub(r"[{]\s*([^{}^]*?)\s*[}](?=\s|$|\^)", r" \1 ", text) if "^{" not in text else text
    parsed = _parse_words(text.strip(" .()"), spaced=spaced or text.startswith(" "))
    if parsed is None or not money:
        return parsed
    return money if parsed in (money, ()) else ()


def strip_units(text: str) -> str:
    """Return an expression without the units, money signs and percent signs between its numbers."""
    text = regex.sub(r"\\text\s*\{[^{}]*\}(?:\^\{?[0-9]\}?)?|USD|%|[€£¥₹₩₽¢]", " ", text)
    stripped: str = regex.sub(
        r"(?<=[0-9)}] ?)([A-Za-z]+)(?:\^\{?[0-9]\}?)?",
        lambda m: " " if _canonical(m[1]) and len(m[1]) > 1 else m[0],
        text,
    )
    return stripped


def are_compatible(unit: Unit | None, other: Unit | None) -> bool:
    """Whether units do not contradict each other: one is missing, or they are equal; 60 degrees may be 60 °C."""
    if not unit or not other or unit == other:
        return True
    names = {name for name, _ in (*unit, *other)}
    return "degree" in names and names <= {"degree", "C", "F"}


def _parse_words(text: str, *, spaced: bool) -> Unit | None:
    """Return the product of the words' units, empty if a word is no unit; None if the words change the number."""
    powers: dict[str, int] = {}
    at, sign, prefix_power, num_words, is_known = 0, 1, 1, 0, True
    while at < len(text):
        word = _WORD.match(text, at)
        if word is None or num_words == MAX_WORDS:
            return None
        num_words += 1
        at = word.end()
        name = _canonical(word[0])
        lower = word[0].lower()
        power = _EXPONENT.match(text, at) if name else None
        raised = 1
        if power is not None:
            at = power.end()
            raised = int(power[1] or power[2] or 1)
        if lower in ("square", "sq", "cubic", "cu") and text[at:].strip(" ."):
            prefix_power = 2 if lower.startswith("sq") else 3
        elif lower == "per" and text[at:].strip():
            sign = -1
        elif name and (
            spaced or len(word[0]) > 1 or not word[0].isalpha() or num_words > 1 or text[at : at + 1] == "/"
        ):
            powers[name] = powers.get(name, 0) + sign * raised * prefix_power
            prefix_power = 1
        elif lower in _NO_UNITS or len(word[0]) < 2 or (num_words == 1 and not spaced):
            return None
        else:
            is_known = False
        connection = _CONNECTED.match(text, at)
        assert connection is not None
        at = connection.end()
        sign = -1 if connection[1] in ("/", "per") else sign
    if not is_known or "unit" in powers:
        return ()
    if powers.keys() & {"C", "F"}:
        powers.pop("degree", None)
    return tuple(sorted((name, power) for name, power in powers.items() if power))


def _canonical(word: str) -> str:
    """Return the name of a unit; empty for other words."""
    if word in _KNOWN:
        return _KNOWN[word]
    lower = word.lower()
    return _LONG.get(lower) or _LONG.get(lower.removesuffix("s")) or _LONG.get(lower.removesuffix("es"), "")


def _currency_of(sign: str) -> str:
    return _KNOWN.get(sign.removeprefix("US ").rstrip("."), sign)


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
