"""Extracts the final answer from a text, and parses it as an exact number."""

from __future__ import annotations

import re
from fractions import Fraction

ANSWER_MARK = "####"
BOX_COMMAND = "\\boxed{"

MAX_NUMBER_LENGTH = 100
"""Maximum number of characters of a number; an untrained policy may write thousands of digits."""

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


def extract_final_answer(text: str) -> str | None:
    r"""Return the text after the last `####` (up to the end of the line) or in the last `\boxed{}`, whichever is later.

    Returns None if there is neither, or if it is empty. Runs in time linear in the length of the text.
    """
    marked, boxed = text.rfind(ANSWER_MARK), text.rfind(BOX_COMMAND)
    if boxed > marked:
        found = _read_braces(text, boxed + len(BOX_COMMAND))
    elif marked >= 0:
        found = text[marked + len(ANSWER_MARK) :].split("\n", 1)[0]
    else:
        return None
    return found.strip() or None


def parse_number(answer: str) -> Fraction | None:
    r"""Return the exact value of a written number, or None for any other text.

    Accepts thousands commas, decimals, fractions (`1/2`, `3 1/2`, `\frac{1}{2}`) and powers of ten. Ignores `$`, `%`,
    `x =`, bold marks and a final period. A sum is not a number: the policy must compute it.
    """
    if len(answer) > MAX_NUMBER_LENGTH:
        return None
    text = answer.replace("−", "-").replace("{,}", ",").replace("\\,", "").strip("*` \t\n")
    text = _DECORATION.sub("", text).strip().rstrip(".").rstrip("* ")
    if assignment := _ASSIGNMENT.match(text):
        text = text[assignment.end() :]
    if match := _DECIMAL.fullmatch(text):
        sign, value, exponent = match[1], _parse_decimal(match[2]), 0
    elif match := _SCIENTIFIC.fullmatch(text):
        sign, value, exponent = match[1], _parse_decimal(match[2]), int(match[3])
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


def _parse_decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").removesuffix("."))


def _read_braces(text: str, start: int) -> str:
    """Return the text from `start` to the matching closing brace; empty if there is none."""
    depth = 1
    for at in range(start, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[start:at]
    return ""
