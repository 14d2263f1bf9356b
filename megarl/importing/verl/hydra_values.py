"""Values of Hydra's overrides, and interpolations between keys; nothing is resolved from the environment."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from megarl.importing.tables import Setting

INTEGER = re.compile(r"[+-]?\d[\d_]*")
FLOAT = re.compile(r"[+-]?(\d[\d_]*\.\d*|\.\d+|\d[\d_]*)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
WORDS: Mapping[str, object] = {"null": None, "true": True, "false": False}
MAX_DEPTH = 32
ARITHMETIC: Mapping[str, Callable[..., object]] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": lambda a, b: a / b if b else None,
    "max": max,
}


def parse_value(text: str) -> object:
    """Return the value of `key=text`: null, booleans, numbers, quoted texts, lists and dictionaries; else the text.

    Raises:
        ValueError: a list, dictionary or quote is not closed; the message completes the sentence "is not valid: ...".
    """
    reader = _Reader(text)
    value = reader.value(end="")
    if reader.at < len(text):
        return text
    return value


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def value(self, end: str) -> object:
        """Read one value, up to a character of `end`."""
        self._skip_blanks()
        if self.text.startswith("[", self.at):
            return self._list()
        if self.text.startswith("{", self.at):
            return self._dict()
        if self.text[self.at : self.at + 1] in ("'", '"'):
            return self._quoted()
        return _scalar(self._plain(end))

    def _list(self) -> list[object]:
        self.at += 1
        items: list[object] = []
        while True:
            self._skip_blanks()
            if self._take("]"):
                return items
            items.append(self.value(end=",]"))
            self._skip_blanks()
            if not (self._take(",") or self.text.startswith("]", self.at)):
                raise ValueError("a list has no closing bracket")

    def _dict(self) -> dict[str, object]:
        self.at += 1
        items: dict[str, object] = {}
        while True:
            self._skip_blanks()
            if self._take("}"):
                return items
            key = self.value(end=":,}")
            self._skip_blanks()
            if not self._take(":"):
                raise ValueError("a dictionary needs key: value")
            items[str(key)] = self.value(end=",}")
            self._skip_blanks()
            if not (self._take(",") or self.text.startswith("}", self.at)):
                raise ValueError("a dictionary has no closing brace")

    def _quoted(self) -> str:
        quote, start = self.text[self.at], self.at + 1
        at = start
        while at < len(self.text) and self.text[at] != quote:
            at += 2 if self.text[at] == "\\" else 1
        if at >= len(self.text):
            raise ValueError("a quote is not closed")
        self.at = at + 1
        return self.text[start:at].replace(f"\\{quote}", quote)

    def _plain(self, end: str) -> str:
        start, depth = self.at, 0
        while self.at < len(self.text) and (depth or self.text[self.at] not in end):
            if self.text.startswith("\\", self.at):
                self.at += 1
            elif self.text.startswith("${", self.at):
                depth += 1
            elif depth and self.text[self.at] == "}":
                depth -= 1
            self.at += 1
        return self.text[start : self.at].strip()

    def _take(self, char: str) -> bool:
        found = self.text.startswith(char, self.at)
        self.at += found
        return found

    def _skip_blanks(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1


def _scalar(text: str) -> object:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def resolve(value: object, look_up: Callable[[str], object], prefix: str, depth: int = 0) -> object:
    """Return `value` with interpolations replaced: `${a.b}`, `${.b}`, `${oc.select:a.b,default}`, `${oc.env:X,b}`,
    and `${mul:2,3}`, also with add, div and max, which NeMo-RL registers.

    Args:
        look_up: returns the value of a key.
        prefix: section of the key that has the value, for relative interpolations.

    Raises:
        LookupError: an interpolation has no value that could be known; the message is the interpolation.
    """
    if isinstance(value, list):
        return [resolve(item, look_up, prefix, depth) for item in value]
    if isinstance(value, dict):
        return {key: resolve(item, look_up, prefix, depth) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    while match := INTERPOLATION.search(value):
        depth += 1
        found = _resolve_one(match.group(1), look_up, prefix)
        if depth > MAX_DEPTH:
            raise LookupError(match.group())
        if match.group() == value:
            return resolve(found, look_up, prefix, depth)
        value = value[: match.start()] + ("null" if found is None else str(found)) + value[match.end() :]
    return value


def _resolve_one(body: str, look_up: Callable[[str], object], prefix: str) -> object:
    function, colon, arguments = body.partition(":")
    if not colon:
        key = f"{prefix}{body}" if body.startswith(".") else body
        found = look_up(key.lstrip("."))
        if found is None:
            raise LookupError(f"${{{body}}}")
        return found
    name, comma, default = arguments.partition(",")
    if function == "oc.select":
        found = look_up(f"{prefix}{name}".lstrip(".") if name.startswith(".") else name.strip())
        return parse_value(default.strip()) if found is None and comma else found
    if function in ARITHMETIC:
        numbers = [parse_value(argument.strip()) for argument in arguments.split(",")]
        if len(numbers) == 2 and all(isinstance(number, int | float) for number in numbers):
            return ARITHMETIC[function](*numbers)
    if function == "oc.env" and comma:
        return parse_value(default.strip())
    raise LookupError(f"${{{body}}}")


def resolve_all(given: Mapping[str, Setting], defaults: Mapping[str, object]) -> dict[str, Setting]:
    """Return the settings with interpolations replaced; one that cannot be known is noted in `unknown`.

    An interpolation that is a whole value and names a key whose value is null is null.

    Args:
        defaults: values of keys that are not given.
    """

    def look_up(key: str) -> object:
        return given[key].value if key in given else defaults.get(key)

    resolved = {}
    for key, setting in given.items():
        resolved[key] = setting
        if setting.unknown:
            continue
        try:
            resolved[key] = replace(setting, value=resolve(setting.value, look_up, key.rpartition(".")[0]))
        except LookupError as e:
            name = str(e.args[0]).removeprefix("${").removesuffix("}")
            section = key.rpartition(".")[0] if name.startswith(".") else ""
            named = given.get(f"{section}{name}".lstrip("."))
            if named is not None and named.value is None:
                resolved[key] = replace(setting, value=None)
            else:
                resolved[key] = replace(setting, unknown=(str(e.args[0]),))
    return resolved
