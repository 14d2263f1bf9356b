"""The block of code in a text; in well-formed texts it is the one that CommonMark has."""

from __future__ import annotations

import time

import pytest
from markdown_it import MarkdownIt

from megarl.sandbox.sandbox import LABELS, find_code
from tests.hostile_texts import hostile_texts

TEXTS = {
    "labelled before unlabelled": ("```python\nx = 1\n```\nOutput:\n```\n3\n```\n", "x = 1\n"),
    "last labelled": ("```py\na\n```\nor\n```Python\nb\n```", "b\n"),
    "last unlabelled": ("```\na\n```\n```\nb\n```", "b\n"),
    "other label": ("```python\na\n```\nRun:\n```bash\npython a.py\n```\nBye ```\n", "a\n"),
    "only other labels": ("```bash\nls\n```", None),
    "upper case and carriage returns": ("```PYTHON3 \r\na\r\n```\r\n", "a\r\n"),
    "title": ('```python title="a.py"\na\n```', "a\n"),
    "four backticks": ("````python\na\n````", "a\n"),
    "empty": ("```python\n```", ""),
    "blank": ("```\n\n```", "\n"),
    "no block": ("x = 1", None),
    "open": ("```python\nx = 1\n", None),
    "inline": ("<think>maybe ```x```</think>\n```python\na\n```", "a\n"),
    "inline only": ("say ```x``` or ``` y ```", None),
    "backticks in code": ("```python\nx = '```' + 'a'\ny = 2\n```", "x = '```' + 'a'\ny = 2\n"),
    "quoted": ("> ```python\n> a\n", None),
    "windows of other text": ("```text\nno\n```\n```python\na\n```\n```json\n{}\n```", "a\n"),
}
LENIENT = {
    "behind text": ("Here it is: ```python\na\n```", "a\n"),
    "in a list": ("- ```bash\n  ls\n  ```\n- ```python\na\n```", "a\n"),
    "end on the last line": ("```python\na = 1```", "a = 1\n"),
    "begins again": ("```python\na\n```python\nb\n```", "b\n"),
}
"""Texts that Markdown reads otherwise, and policies write."""


def find_in_markdown(text: str) -> str | None:
    """Return the code as `find_code` describes it, of the closed blocks that a parser of CommonMark finds."""
    fences = [token for token in MarkdownIt().parse(text) if token.type == "fence" and token.level == 0]
    lines = text.splitlines()
    closed = [token for token in fences if token.map and lines[token.map[1] - 1].strip().strip("`") == ""]
    found = [(token.info.strip().lower().partition(" ")[0], token.content) for token in closed]
    labelled = [content for label, content in found if label in LABELS]
    unlabelled = [content for label, content in found if not label]
    return (labelled or unlabelled or [None])[-1]


@pytest.mark.parametrize("name", TEXTS)
def test_finds_what_markdown_has(name):
    text, code = TEXTS[name]
    expected = find_in_markdown(text)
    assert find_code(text) == code
    assert (None if code is None else code.replace("\r", "")) == expected


@pytest.mark.parametrize("name", LENIENT)
def test_finds_what_policies_write(name):
    assert find_code(LENIENT[name][0]) == LENIENT[name][1]


def test_takes_time_in_proportion_to_the_text():
    def seconds(text: str) -> float:
        start = time.process_time()
        find_code(text)
        return time.process_time() - start

    for unit in ("```\n", "`", " ", "```python\n", "```" + " " * 200, "a ``` b\n", "\t```x"):
        base = max(seconds(unit * 20_000), 0.001)
        assert seconds(unit * 160_000) < 40 * base, unit


def test_any_text_has_code_or_none():
    for text in hostile_texts().values():
        code = find_code(text)
        assert code is None or code.replace("\n", "").replace("`", "") in text.replace("\n", "").replace("`", "")
