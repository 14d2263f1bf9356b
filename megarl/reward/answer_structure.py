r"""Reads the outer form of an answer: a text, choice, set, list, tuple, interval, matrix, equation or inequality.

A structure is a list of a kind and its parts, which can be sent as JSON:

    ["expression", "x^{2}+1"]                 ["named", "x", STRUCTURE]            x = ..., f(x) = ..., x \in ...
    ["set", [STRUCTURE, ...]]                 {1, 2}, also 1, 2 and 1 or 2 and \pm 1
    ["bracket", "(", "]", [STRUCTURE, ...]]   (1, 2), a tuple or an interval; ":" for 1:2
    ["union", [STRUCTURE, ...]]               of intervals, and of inequalities with "or"; "intersection", "difference"
    ["matrix", [[STRUCTURE, ...], ...]]       ["equal", [STRUCTURE, ...]]          sides of an equation
    ["relation", ["1", "x"], ["<"]]           1 < x                                ["reals"]
"""

from __future__ import annotations

from typing import Any, TypeAlias

import regex

from megarl.reward.answer_text import ROW_END, is_enclosed, is_too_deep, name_commands, split_outside
from megarl.reward.quantities import Unit, is_name, is_sum_of_names, read_unit

Structure: TypeAlias = list[Any]

_WORD_BETWEEN = r"(?:,?\s*\\text\s*\{{\s*,?\s*{0}\s*,?\s*\}}|,?(?<=[\s,)\]}}0-9]){0}(?=[\s(\[{{\\0-9-]))"
_OR, _AND = _WORD_BETWEEN.format("or"), _WORD_BETWEEN.format("and")
_COMMA = r",(?!\s*(?:\\text\s*\{\s*)?(?:or|and)\b)|;"
_COMPARISON = r"<|>|\\(?:le|ge|ne)(?![A-Za-z])"
_NAME_TUPLE = r"\((?:\s*\\?[A-Za-z]+(?:_[0-9a-z])?\s*,?)+\)"
_VARIABLE = r"(?<![\\A-Za-z])(?![ei](?![A-Za-z]))[A-Za-z]"
_SIGNS = {"<": "<", ">": ">", "\\le": "<=", "\\ge": ">=", "\\ne": "!="}
_MATRIX = regex.compile(
    r"\(?\s*\\begin\s*\{(?:[pbB]?(?:small)?matrix|array)\}\s*(?:\{[clr| ]*\})?(.*?)\\end\s*\{[a-zB]+\}\s*\)?",
    regex.DOTALL,
)
_LETTER = regex.compile(r"\(?([A-J])\)?|\(([a-j])\)")
_CHOICE = regex.compile(
    r"(?i:(?:option|choice|answer):?\s*)?(?:\(([a-jA-J])\)|([a-jA-J])[.):]|([A-J])(?=$)|([a-j])(?=$))\s*(.*)"
)
_WORDS = regex.compile(r"[^\W\d_]{4,}|[A-Z][a-z]+|[A-Z]{3,}|yes|no|odd|even|true|false")
_REALS = frozenset({"all real numbers", "all reals", "real numbers", "reals", "the real numbers", "all real number"})
_TRAILING_TEXT = regex.compile(r"^(.*[^\s{^_])(\s*\\text\s*\{[^{}]*\}\s*(?:\^\s*\{?\s*[0-9]\s*\}?)?)$", regex.DOTALL)
_TRAILING_WORD = regex.compile(r"^(.*[\s})0-9])([a-z]{2,}(?:\s*\^\s*\{?\s*[23]\s*\}?)?)$", regex.DOTALL)
_BASE = regex.compile(
    r"\(?([0-9A-Za-z]*[0-9][0-9A-Za-z]*)\)?\s*_\s*\{?\s*(?:\\text\s*\{\s*)?([0-9]+|[a-z]+)\s*\}?\s*\}?"
)


def words_of(text: str) -> str:
    """Return the words of a cleaned text in lower case, without fonts, punctuation and brackets around them."""
    text = regex.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).replace("\\", " ").replace("$", " ")
    return " ".join(regex.sub(r"[(){}\"'.,;:!?*]", " ", text).lower().split())


def read_choice(text: str) -> str | None:
    """Return the letter of a reference that is one of a multiple choice; None for other texts."""
    match = _LETTER.fullmatch(_plain(text))
    return (match[1] or match[2]).upper() if match else None


def chosen_letter(text: str) -> str | None:
    """Return the letter that an answer chooses, which may be followed by its text, as `(C) 12`; None without one."""
    match = _CHOICE.fullmatch(_plain(text))
    if match is None or regex.search(r"\([a-jA-J]\)|(?<![A-Za-z])[A-J](?![A-Za-z])", match[5] or ""):
        return None
    return str(match[1] or match[2] or match[3] or match[4]).upper()


def is_text(text: str) -> bool:
    """Whether a reference is a word or a sentence, and no formula."""
    plain = _plain(text)
    if plain == text and any(sign in text for sign in "\\^_=<>+*/|{"):
        return False
    if not plain or regex.search(r"[\\^=<>+*/|{}\d]", plain) or words_of(text) in _REALS:
        return False
    return plain != text or all(_WORDS.search(part) for part in split_outside(plain, r"[,;]"))


def split_unit(text: str) -> tuple[str, Unit]:
    """Return an expression without the unit after it or the currency before it, and the unit."""
    text = text.strip()
    sign = regex.match(r"(USD|[€£¥₹])\s*|.*?\s*(\^\\circ|%|[€£¥₹])$", text, regex.DOTALL)
    if sign is not None:
        rest = text[len(sign[0]) :] if sign[1] else text[: sign.start(2)]
        return rest.strip(), read_unit(sign[2] or "", sign[1] or "") or ()
    for pattern in (_TRAILING_TEXT, _TRAILING_WORD):
        match = pattern.match(text)
        unit = read_unit(" " + match[2]) if match else None
        if match and (unit or (unit is not None and pattern is _TRAILING_TEXT)):
            return match[1].strip(), unit
    return text, ()


def read_base(text: str) -> tuple[str, str] | None:
    """Return digits and base of a number such as `1011_2`; None for other texts."""
    match = _BASE.fullmatch(text)
    names = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
    return (match[1].upper().lstrip("0"), names.get(match[2], match[2])) if match else None


def read_structure(text: str) -> Structure | None:
    """Return the structure of a cleaned answer; None if its brackets are nested too deeply."""
    if is_too_deep(text):
        return None
    follows = r"" if regex.search(r",\s|\band\b|\bor\b", text) else r"\s?[A-Za-z\\(]"
    return _read(regex.sub(rf"(?<=[0-9]),(?=[0-9]{{3}}(?![0-9]){follows})", "", text))


def _plain(text: str) -> str:
    return " ".join(regex.sub(r"\\text\s*\{([^{}]*)\}", r"\1 ", text).split()).strip(" .")


def _read(text: str) -> Structure:
    text = text.strip(" .")
    while is_enclosed(text, "{", "}"):
        text = text[1:-1].strip()
    if words_of(text) in _REALS or regex.fullmatch(r"\\mathbb\s*\{?\s*R\s*\}?", text):
        return ["reals"]
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None and "\\begin" not in matrix[1]:
        rows = [row for row in matrix[1].split(ROW_END) if row.strip()]
        return ["matrix", [[_read(cell) for cell in split_outside(row, "&")] for row in rows]]
    for read in (_read_combined, _read_list, _read_relation, _read_equation, _read_sets, _read_brackets):
        found = read(text)
        if found is not None:
            return found
    if "\\pm" in text and text.count("\\pm") == 1:
        before, after = text.split("\\pm")
        return ["set", [_read_expression(f"{before}{sign}{after}") for sign in "+-"]]
    return _read_expression(text)


def _read_combined(text: str) -> Structure | None:
    """Read inequalities with "or" and "and"."""
    if not regex.search(_COMPARISON, text):
        return None
    for separator, kind in (
        (_OR, "union"),
        (r"\\cup(?![A-Za-z])", "union"),
        (_AND, "intersection"),
        (_COMMA, "intersection"),
    ):
        parts = split_outside(text, separator)
        if len(parts) > 1 and all(regex.search(_COMPARISON, part) for part in parts):
            return [kind, [_read(part) for part in parts]]
    return None


def _read_list(text: str) -> Structure | None:
    parts = [part for part in split_outside(text, f"{_COMMA}|{_OR}|{_AND}") if part]
    if len(parts) < 2:
        return None
    name = regex.match(r"([A-Za-z]|\\[a-z]+)\s*(?:=|\\in(?![A-Za-z]))\s*", parts[0])
    if name and not any("=" in part for part in parts[1:]):
        return ["named", name[1], _as_set([parts[0][name.end() :], *parts[1:]])]
    names = [regex.match(r"([A-Za-z]|\\[a-z]+)\s*=", part) for part in parts]
    if name and all(each and each[1] == name[1] for each in names):
        return ["named", name[1], _as_set([part.split("=", 1)[1] for part in parts])]
    return _as_set(parts)


def _as_set(parts: list[str]) -> Structure:
    items: list[Structure] = []
    for part in parts:
        item = _read(part)
        items += item[1] if item[0] == "set" and "\\pm" in part else [item]
    return ["set", items]


def _read_relation(text: str) -> Structure | None:
    sides = split_outside(text, _COMPARISON)
    if len(sides) < 2 or not all(sides):
        return None
    signs, position = list[str](), 0
    for side in sides[:-1]:
        position = text.index(side, position) + len(side)
        sign = regex.compile(_COMPARISON).search(text, position)
        assert sign is not None
        signs.append(_SIGNS[sign[0]])
        position = sign.end()
    return ["relation", [_prepare(side) for side in sides], signs]


def _read_equation(text: str) -> Structure | None:
    exact, *rounded = split_outside(text, r"\\approx(?![A-Za-z])")
    if rounded:
        return _read(rounded[-1] if not exact or is_name(exact) else exact)
    sides = split_outside(text, r"(?<![<>!])=")
    if len(sides) == 1:
        element = split_outside(text, r"\\in(?![A-Za-z])")
        return ["named", element[0], _read(element[1])] if len(element) == 2 and is_name(element[0]) else None
    if not all(sides):
        return _read(" = ".join(filter(None, sides)))
    if len(sides) == 2 and (is_name(sides[0]) or regex.fullmatch(_NAME_TUPLE, sides[0])):
        return ["named", sides[0].replace(" ", ""), _read(sides[1])]
    if len(sides) > 2 and is_sum_of_names(sides[0]):
        sides = [side for side in sides[1:-1] if not regex.search(_VARIABLE, side)] + sides[-1:]
    if len(sides) == 1:
        return _read(sides[0])
    return ["equal", [_read(side) for side in sides]]


def _read_sets(text: str) -> Structure | None:
    for separator, kind in ((r"\\cup(?![A-Za-z])", "union"), (r"\\cap(?![A-Za-z])", "intersection")):
        parts = split_outside(text, separator)
        if len(parts) > 1:
            return [kind, [_read(part) for part in parts]]
    parts = split_outside(text, r"\\backslash(?![A-Za-z])")
    if len(parts) == 2:
        return ["difference", [_read(part) for part in parts]]
    if text == "\\emptyset":
        return ["set", []]
    if not is_enclosed(text, "\\{", "\\}"):
        return None
    inner = text[2:-2].strip()
    builder = regex.match(r"[A-Za-z]\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?[|:]\s*", inner)
    if builder:
        return _read(inner[builder.end() :])
    return _as_set([part for part in split_outside(inner, "[,;]") if part])


def _read_brackets(text: str) -> Structure | None:
    ratio = split_outside(text, ":")
    if len(ratio) > 1 and all(ratio):
        return ["bracket", ":", ":", [_read(part) for part in ratio]]
    if not (text[:1] in ("(", "[") and text[-1:] in (")", "]") and len(text) > 2):
        return None
    if not is_enclosed(text, text[0], text[-1]):
        return None
    parts = split_outside(text[1:-1], "[,;]")
    if len(parts) > 1:
        return ["bracket", text[0], text[-1], [_read(part) for part in parts]]
    return _read(text[1:-1])


def _read_expression(text: str) -> Structure:
    return ["expression", _prepare(text)]


def _prepare(text: str) -> str:
    """Return an expression as latex2sympy reads it: without a unit, and with decimals as fractions."""
    text = name_commands(split_unit(text)[0])
    text = regex.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
    text = regex.sub(r"([0-9]*)\.([0-9]+)", lambda m: f"(\\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}})", text)
    text = regex.sub(r"([0-9]+)\.(?![0-9])", r"\1", text)
    text = regex.sub(r"_\{([A-Za-z0-9])\}", r"_\1", text)
    return text.replace("+ -", "-").replace("+-", "-").replace("*", "\\cdot ").strip()
