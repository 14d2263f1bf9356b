"""What was read of lists before, so that a longer list costs only its new elements.

Clients send their whole conversation with each request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import from_json

_SPACE = re.compile(r"[ \t\r\n]*")

MAX_BRANCHES = 16
"""Lists that are kept, the least recently used ones are dropped. A list that continues another one replaces it."""


class PrefixMemory[T, V]:
    """Computes a value for each element of a list from the value before; not again for a prefix that is known.

    Known prefixes are found by comparing elements, which for thousands of messages takes microseconds, where reading,
    hashing and rendering them takes milliseconds.
    """

    def __init__(self) -> None:
        self._branches: list[tuple[list[T], list[V]]] = []
        """Elements and their values, the most recently used list last."""

    def values(self, elements: Sequence[T], compute: Callable[[V | None, T], V]) -> list[V]:
        """Return the value of each element; `compute` gets the value before, None for the first, and the element.

        If it raises an exception, nothing is kept of this list.
        """
        lengths = [_common_length(known, elements) for known, _ in self._branches]
        length = max(lengths, default=0)
        found = lengths.index(length) if length else None
        known = ([], []) if found is None else self._branches[found]
        values = known[1][:length]
        for element in elements[length:]:
            values.append(compute(values[-1] if values else None, element))
        if found is not None and length in (len(known[0]), len(elements)):
            del self._branches[found]
        else:
            known = (known[0][:length], known[1][:length])
        known[0].extend(elements[length:])
        known[1].extend(values[length:])
        self._branches = [*self._branches, known][-MAX_BRANCHES:]
        return values


class JsonMemory:
    """Parses objects that have one long list each; not again the elements with which the text before began too.

    before  {"model": "m", "messages": [A, B], "stream": true}
    now     {"model": "m", "messages": [A, B, C, D], "stream": true}     parsed: {"model": "m", "messages": [C, D], ...
    """

    def __init__(self, name: str) -> None:
        """`name`: key of the list."""
        self._name, self._key = name, re.compile(rf'"{name}"\s*:\s*\[')
        self._head = self._known = ""
        """The last text up to the beginning of the list, and up to the end of its last element."""
        self._elements: list[Any] = []

    def parse(self, text: str) -> Any:
        """Return the value of a JSON text.

        Raises:
            ValueError: it is no JSON, has half of a surrogate pair, numbers of thousands of digits or that are not
                finite, or is nested too deeply.
        """
        following = text[len(self._known) :].lstrip() if self._known and text.startswith(self._known) else ""
        if following[:1] in (",", "]"):
            head, elements, rest = self._head, self._elements, following.removeprefix(",")
        else:
            match = self._key.search(text)
            head, elements, rest = "" if match is None else text[: match.end()], [], text[match.end() if match else 0 :]
        found = from_json(head + rest, allow_inf_nan=False)
        added = found.get(self._name) if isinstance(found, dict) else None
        length = _elements_length(rest, added) if head and isinstance(added, list) else None
        if isinstance(added, list) and length is not None:
            self._head, self._elements = head, [*elements, *added]
            self._known = text[: len(text) - len(rest) + length]
            return {**found, self._name: self._elements}
        if elements:  # the key occurs twice
            self._known = ""
            return self.parse(text)
        return found


def _elements_length(text: str, elements: Sequence[object]) -> int | None:
    """Return the length of the elements with which a text begins; None: it does not begin with these."""
    decode, end = json.JSONDecoder().raw_decode, 0
    try:
        for number, expected in enumerate(elements):
            if number:
                end = text.index(",", end) + 1
            space = _SPACE.match(text, end)
            found, end = decode(text, space.end() if space else end)
            if found != expected:
                return None
    except ValueError:  # the elements are those of another list of this name
        return None
    return end


def _common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many elements at the beginning are equal."""
    low, high = 0, min(len(first), len(second))
    middle = high
    while low < high:
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
