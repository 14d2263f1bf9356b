"""Extracts the final answer from a text."""

from __future__ import annotations

import re

ANSWER_MARK = "####"

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED = re.compile(r"[^\s$]+")
_LEAD_IN = re.compile(
    r"[*_\s]*(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|our|my)\s+)?(?:final\s+|correct\s+)?answer[*_]*\s*"
    r"(?:is\b|[:=])?\s*[:=]?[*_]*\s*",
    re.IGNORECASE,
)
_HEADING = re.compile(r"[*_\s]*(?:(?:step|part)?\s*\d+\s*[.):]\s*)?[^\W\d_]{2,}(?![^\W\d_]*\s*[=\d])", re.IGNORECASE)
"""Matches a heading of a section, such as `Verification` or `2. Check`; `x = 5` and `\text{No}` are none."""


def extract_final_answer(text: str) -> str | None:
    r"""Return the text after the last `####` (up to the end of the line) or in the last `\boxed{}`, whichever is later.

    `\fbox{}` is a box, too, and braces may be missing (`\boxed 5`). "Answer:" and "The answer is" after `####` are
    left out. A heading of words (`#### Verification`) is no answer if there is a box or another `####`. Returns None if
    there is neither, or if it is empty. Runs in time linear in the length of the text.
    """
    marked, end = None, len(text)
    box_end = max((match.end() for match in _BOX.finditer(text)), default=-1)
    while (begin := text.rfind(ANSWER_MARK, 0, end)) > box_end:
        line = text[begin + len(ANSWER_MARK) : _line_end(text, begin)]
        if line.strip() and not _HEADING.match(_without_lead_in(line)):
            return _read_marked(text, begin)
        marked = begin if marked is None else marked
        end = text.rfind("\n", 0, begin)
        if end <= box_end:
            break
    if box_end >= 0:
        return _read_box(text, box_end).strip() or None
    return None if marked is None else _read_marked(text, marked)


def _read_marked(text: str, begin: int) -> str | None:
    """Return the answer after the mark at `begin`; after `#### Answer:` alone, it is the next line."""
    end = _line_end(text, begin)
    line = text[begin + len(ANSWER_MARK) : end].strip()
    answer = _without_lead_in(line)
    if not answer and line:
        answer = text[end:].lstrip().split("\n", 1)[0].strip()
    return answer or None


def _without_lead_in(line: str) -> str:
    match = _LEAD_IN.match(line)
    return line[match.end() :].strip() if match else line.strip()


def _line_end(text: str, begin: int) -> int:
    end = text.find("\n", begin)
    return len(text) if end < 0 else end


def _read_box(text: str, start: int) -> str:
    """Return the content of the box whose command ends at `start`; empty if its brace is not closed."""
    if not text.startswith("{", start):
        match = _UNBRACED.match(text, start)
        return match[0] if match else ""
    depth = 0
    at = start
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : at]
        at += 1
    return ""
