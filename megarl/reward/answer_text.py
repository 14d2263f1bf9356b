"""Brings written answers into one spelling: characters, LaTeX spacing, fonts, braces, money signs and delimiters."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

import regex

MAX_BRACE_DEPTH = 12
"""Deepest nesting of braces and parentheses that is read; parsers of LaTeX take exponential time for more."""

_GREEK = {chr(c): f"\\{unicodedata.name(chr(c)).split()[-1].lower()} " for c in range(0x3B1, 0x3CA) if c != 0x3C2}
_VULGAR = {c: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", c).split("⁄")) for c in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_FULL_WIDTH = {chr(c): chr(c - 0xFEE0) for c in range(0xFF01, 0xFF5F)}
_SIGNS = {
    **dict.fromkeys("−–—‐‑‒﹣", "-"), **dict.fromkeys("⋅·∙", "\\cdot "),
    **dict.fromkeys("\u00a0\u2009\u202f\u3000", " "),
    **dict.fromkeys("\u200b\u2060\ufeff", ""), **dict.fromkeys("≤⩽", "\\le "), **dict.fromkeys("≥⩾", "\\ge "),
    "×": "\\times ", "÷": "\\div ", "°": "^\\circ ", "º": "^\\circ ", "∞": "\\infty ", "≈": "\\approx ",
    "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "∈": "\\in ",
    "±": "\\pm ", "⁄": "/", "∕": "/", "…": "\\ldots ", "’": "'", "μ": "u", "µ": "u",
}  # fmt: skip
_CHARACTERS = str.maketrans(_GREEK | _VULGAR | _FULL_WIDTH | _SIGNS)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")

_COMMANDS = {
    **dict.fromkeys(("left", "right", "displaystyle", "textstyle", "limits", "quad", "qquad", "thinspace"), " "),
    **dict.fromkeys((f"{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r", "m")), " "),
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"), "\\frac"),
    "dbinom": "\\binom", "tbinom": "\\binom",
    **dict.fromkeys(("mathrm", "textrm", "textbf", "textit", "textsf", "texttt", "mbox", "hbox"), "\\text"),
    **dict.fromkeys(("textnormal", "operatorname", "mathbf", "mathit", "mathsf", "boldsymbol", "bm", "unit"), "\\text"),
    **dict.fromkeys(("degree", "degrees", "textdegree"), "^\\circ "), **dict.fromkeys(("geq", "geqslant"), "\\ge "),
    **dict.fromkeys(("leq", "leqslant"), "\\le "), "neq": "\\ne ", "lt": "<", "gt": ">", "ast": "*",
    **dict.fromkeys(("simeq", "doteq"), "\\approx "), "varnothing": "\\emptyset ", "R": "\\mathbb{R}",
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"), "lbrace": "\\{", "rbrace": "\\}",
    "langle": "(", "rangle": ")", "lbrack": "[", "rbrack": "]",
    **dict.fromkeys(("land", "wedge"), "\\text{ and }"), **dict.fromkeys(("lor", "vee"), "\\text{ or }"),
    "euro": "€", "pounds": "£", "textsterling": "£", "textdollar": "$", "dots": "\\ldots ", "cdots": "\\ldots ",
    "setminus": "\\backslash ", "minus": "-", "plus": "+",
}  # fmt: skip
_COMMAND = regex.compile(r"\\([A-Za-z]+)")
_SPACING = regex.compile(r"\\[,;:> ]|~|\\[hv]space\*?\{[^{}]*\}|\\(?:left|right)\s*\.")
ROW_END = "\x1e"
"""Stands for LaTeX's end of a row in a cleaned answer."""
_GROUP = r"(\{(?:[^{}]++|(?1))*+\})"
_ARGUMENT = r"([A-Za-z0-9]|\\[A-Za-z]+(?![A-Za-z]*\s*\{))"
_FIRST_ARGUMENT = regex.compile(rf"(\\(?:frac|binom|sqrt(?:\s*\[[^\[\]]*\])?))\s*{_ARGUMENT}")
_SECOND_ARGUMENT = regex.compile(rf"(?<=\\frac|\\binom)\s*{_GROUP}\s*([A-Za-z0-9]|\\[A-Za-z]+(?![A-Za-z]*\s*\{{))")
_REDUNDANT = regex.compile(r"(?<!\\)\{\s*(?<!\\)(\{[^{}]*\})\s*\}")
_LEAD_IN = regex.compile(
    r"(?:\\text\s*\{\s*)?(?:(?:the )?(?:final |correct )?answer(?: is)?\s*:?|approximately|approx\.?|about|roughly)\s*"
    r"(?:\}|(?=[-0-9\\$.(A-Z]))\s*(?=.)",
    regex.IGNORECASE,
)
_PLAIN_ROOT = regex.compile(r"(?<![\\A-Za-z])sqrt\s*(\((?:[^()]++|(?1))*+\))")
_PLAIN_NAME = regex.compile(
    r"(?<![\\A-Za-z{])(pi|theta|alpha|beta|exp|sin|cos|tan|log|ln|infinity|infty|inf)(?![A-Za-z])", regex.IGNORECASE
)


def clean_answer(text: str) -> str:
    r"""Return the answer in one spelling, for example `\frac{1}{2} \text{ cm}` for `$\dfrac12\,\mathrm{ cm}$.`"""
    text = regex.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", " ", text).translate(_CHARACTERS)
    text = regex.sub(r"[⁰¹²³⁴-⁹⁺⁻]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    text = regex.sub(r"√\s*([A-Za-z0-9]+)", r"\\sqrt{\1}", text).replace("√", "sqrt")
    text = _unwrap(text)
    text = regex.sub(r"\\\\\s*(?:\[[0-9.]+(?:pt|em|ex|mm)\])?", ROW_END, text)
    text = text.replace("\\!", "").replace("{,}", ",").replace("\\text{,}", ",")
    text = regex.sub(r"\bUS\s*\\?\$", "USD ", text)
    text = text.replace("\\%", "%").replace("\\$", "USD ")
    text = text.replace("$", "USD " if text.count("$") % 2 else "")
    text = _SPACING.sub(" ", text)
    text = _COMMAND.sub(lambda m: _COMMANDS.get(m[1], m[0]), text)
    text = regex.sub(r"\^\s*\{\s*(?:\\circ|\\text\s*\{\s*o\s*\}|o)\s*\}|\^\s*\\circ|\^\s*o\b", r"^\\circ ", text)
    text = regex.sub(r"\\text\s*\{([^{}]*(?:[0-9]|USD|[€£¥₹])[^{}]*)\}", r" \1 ", text)
    text = regex.sub(r"\{\s*\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}", text)
    if lead_in := _LEAD_IN.match(text):
        text = text[lead_in.end() :]
    text = regex.sub(r"<=|=<", r"\\le ", text)
    text = regex.sub(r">=", r"\\ge ", text)
    text = regex.sub(r"!=", r"\\ne ", text)
    text = regex.sub(r":=|==+", "=", text)
    text = _PLAIN_ROOT.sub(lambda m: f"\\sqrt{{{m[1][1:-1]}}}", text)
    for _ in range(MAX_BRACE_DEPTH):
        text, changed = _REDUNDANT.subn(r"\1", text)
        if not changed:
            break
    text = _FIRST_ARGUMENT.sub(r"\1{\2}", text)
    text = _SECOND_ARGUMENT.sub(r"\1{\2}", text)
    return _unwrap(regex.sub(r"\s+", " ", text))


def name_commands(text: str) -> str:
    r"""Return an expression with a backslash before plain names of functions and constants, as in `\pi/2`."""
    text = regex.sub(r"\\text\s*\{\s*([A-Za-z]+|)\s*\}", r"\1 ", text)
    return str(_PLAIN_NAME.sub(lambda m: "\\infty" if m[1].lower().startswith("inf") else f"\\{m[1].lower()}", text))


def is_too_deep(text: str) -> bool:
    """Whether braces and parentheses are nested deeper than `MAX_BRACE_DEPTH`."""
    return any(depth > MAX_BRACE_DEPTH for _, depth in _depths(text))


def is_enclosed(text: str, opening: str, closing: str) -> bool:
    """Whether the first and the last bracket of a text belong together."""
    if not (text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing)):
        return False
    last = len(text) - len(closing)
    inside = [depth for at, depth in _depths(text) if len(opening) <= at < last]
    return all(depth > 0 for depth in inside) and _depth_after(text) == 0


def split_outside(text: str, separator: str) -> list[str]:
    """Return the parts of a text between matches of a regular expression that are outside of all brackets."""
    depth_at = dict(_depths(text))
    parts, begin = [], 0
    for match in regex.finditer(separator, text):
        if depth_at.get(match.start(), 0) == 0:
            parts.append(text[begin : match.start()].strip())
            begin = match.end()
    return [*parts, text[begin:].strip()]


def _depths(text: str) -> Iterator[tuple[int, int]]:
    """Yield each position with the number of brackets that are open there; `(` may be closed by `]`."""
    depth = 0
    for at, character in enumerate(text):
        if character in ")]}":
            depth -= 1
        yield at, depth
        if character in "([{":
            depth += 1


def _depth_after(text: str) -> int:
    return sum((c in "([{") - (c in ")]}") for c in text)


def _unwrap(text: str) -> str:
    """Return the text without bold marks, delimiters of formulas, outer braces and final punctuation."""
    before = None
    while text != before:
        before = text
        text = text.strip(" \t\r\n*`\x1e")
        if not text.endswith(("...", "\\{", "\\}")):
            text = text.rstrip(" .,;:\\")
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
                inner = text[len(opening) : len(text) - len(closing)]
                text = text if opening in inner else inner
        for opening in ("{", "\\boxed{", "\\fbox{", "\\mathbf{", "\\bf{"):
            if text.startswith(opening) and is_enclosed(text[len(opening) - 1 :], "{", "}"):
                text = text[len(opening) : -1]
    return text
