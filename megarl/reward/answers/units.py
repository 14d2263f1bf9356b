"""Reads units of measurement, currencies, percent and degrees beside numbers."""

from __future__ import annotations

from typing import TypeAlias

import regex

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
