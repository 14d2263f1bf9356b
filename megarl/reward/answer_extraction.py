"""The final answer of a text, and the number that it denotes."""

from __future__ import annotations

import re
from fractions import Fraction

MARK = "####"
BOX = "\\boxed{"

LONGEST_NUMBER = 100
"""Characters; a longer answer is read as no number (an untrained policy writes thousands of digits)."""

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_DECIMAL = re.compile(rf"([-+]?)\s*({_UNSIGNED})")
_SCIENTIFIC = re.compile(
    rf"([-+]?)\s*({_UNSIGNED})(?:[eE]|\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*)\{{?([-+]?\d{{1,2}})\}}?"
)
_FRACTION = re.compile(
    r"([-+]?)\s*(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)"
    r"|([-+]?)\s*(\d+)?\s*\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))"
)
_DECORATION = re.compile(r"\\[$%!]|[$%]|\\left|\\right")
_ASSIGNMENT = re.compile(r"[A-Za-z]\s*=\s*")


def final_answer(text: str) -> str | None:
    r"""What stands behind the last `####` (to the end of its line) or in the last `\boxed{}`, whichever comes later.

    None where there is neither, or nothing in it. Runs in time linear in the text.
    """
    marked, boxed = text.rfind(MARK), text.rfind(BOX)
    if boxed > marked:
        found = _in_braces(text, boxed + len(BOX))
    elif marked >= 0:
        found = text[marked + len(MARK) :].split("\n", 1)[0]
    else:
        return None
    return found.strip() or None


def number(answer: str) -> Fraction | None:
    r"""The exact value of a written number, None for anything else.

    Reads thousands commas, decimals, fractions (`1/2`, `3 1/2`, `\frac{1}{2}`) and powers of ten, past `$`, `%`,
    `x =`, bold marks and a full stop. A sum is no number: a policy is to work it out.
    """
    if len(answer) > LONGEST_NUMBER:
        return None
    text = answer.replace("−", "-").replace("{,}", ",").replace("\\,", "").strip("*` \t\n")
    text = _DECORATION.sub("", text).strip().rstrip(".").rstrip("* ")
    if assignment := _ASSIGNMENT.match(text):
        text = text[assignment.end() :]
    if match := _DECIMAL.fullmatch(text):
        sign, value, exponent = match[1], _decimal(match[2]), 0
    elif match := _SCIENTIFIC.fullmatch(text):
        sign, value, exponent = match[1], _decimal(match[2]), int(match[3])
    elif match := _FRACTION.fullmatch(text):
        groups = [g for g in (match[2], match[6]) if g]
        numerator, denominator = match[3] or match[7] or match[8], match[4] or match[9] or match[10]
        if int(denominator) == 0:
            return None
        sign, exponent = match[1] or match[5] or "", 0
        value = Fraction(int(numerator), int(denominator)) + sum(int(g) for g in groups)
    else:
        return None
    value *= Fraction(10) ** exponent
    return -value if sign == "-" else value


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").removesuffix("."))


def _in_braces(text: str, start: int) -> str:
    """From `start` to the brace that closes; empty where none does."""
    depth = 1
    for at in range(start, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[start:at]
    return ""
