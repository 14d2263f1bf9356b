"""Text that others have made: the policy, environments, services, and exceptions and objects of the user's code.

One rule for lone surrogates, which Python strings may have and UTF-8 cannot encode: they are refused in data files and
in requests of clients, and replaced by U+FFFD in all other text before it reaches a tokenizer, a file or a service.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from megarl.user_code import outcome_of

_SURROGATE = re.compile("[\ud800-\udfff]")


def has_surrogate(text: str) -> bool:
    """Return whether the text has a surrogate, which UTF-8 cannot encode."""
    return _SURROGATE.search(text) is not None


def replace_surrogates(text: str) -> str:
    """Return the text with U+FFFD in the place of each surrogate, so that UTF-8 can encode it."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def join_surrogates(text: str) -> str:
    """Return the text with one character in the place of each pair of surrogates.

    Raises:
        UnicodeDecodeError: a surrogate has no other half.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with all texts in it changed, in lists, tuples and mappings too, in keys and values."""
    match value:
        case str():
            return change(value)
        case list():
            return [map_text(each, change) for each in value]
        case tuple():
            return tuple(map_text(each, change) for each in value)
        case dict():
            return {map_text(key, change): map_text(each, change) for key, each in value.items()}
        case _:
            return value


def escape_controls(text: str) -> str:
    r"""Return the text on one line, with `\n` for a newline and so on for all that a terminal or a log would obey."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def text_of(value: object, convert: Callable[[object], str] = repr) -> str:
    """Return `convert(value)` without surrogates; the name of the type instead if the value cannot be written as text.

    Integers of thousands of digits have no text, neither have lists nested too deeply, and methods of the user's
    classes may raise anything.
    """
    text, error = outcome_of(lambda: replace_surrogates(convert(value)))
    return text if error is None else f"<{type(value).__name__} without text: {type(error).__name__}>"


def describe_error(error: BaseException) -> str:
    """Return type, message and place of an exception as one line of text, because tracebacks cannot be pickled."""
    at = ""
    frame = error.__traceback__
    while frame is not None:
        at = f" (at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})"
        frame = frame.tb_next
    return escape_controls(f"{type(error).__name__}: {text_of(error, str)}{at}")
