"""The settings of another trainer's run: what its script and files give, and its defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from megarl.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One key that the user gave."""

    key: str
    value: object
    """Parsed value: None, bool, int, float, str, list or dict."""
    origin: str
    """Where it was given: `run.sh:12`."""
    unknown: tuple[str, ...] = ()
    """Expansions in the value that only a run of the script would give, as they are written: `$1`."""


class NotConvertible(Exception):  # noqa: N818 -- a result of a conversion, which the report lists
    """A valid setting of the other trainer has no equivalent; the message is the reason."""

    def __init__(
        self,
        reason: str,
        values: Mapping[str, object] | None = None,
        *,
        by_key: Mapping[str, str] | None = None,
    ) -> None:
        """Make the result of a row.

        Args:
            reason: why; of all keys of the row that are given, unless `by_key` has some.
            values: megarl keys that are set all the same.
            by_key: the keys that have no equivalent -> why.
        """
        super().__init__(reason)
        self.values = values or {}
        self.by_key = by_key


class Refused(Exception):  # noqa: N818 -- as NotConvertible
    """With a setting of the other trainer, megarl would train something else; the message is the reason."""

    def __init__(self, key: str, reason: str) -> None:
        """`key`: the other trainer's key."""
        super().__init__(reason)
        self.key = key


class Settings:
    """Values by the other trainer's keys. Each method raises ConfigError with file, line and key for a wrong type."""

    def __init__(self, given: Mapping[str, Setting], defaults: Mapping[str, object]) -> None:
        self.given = given
        self.defaults = defaults

    def is_given(self, key: str) -> bool:
        """Whether the user gave `key`, with a value that is known without running the script."""
        return key in self.given and not self.given[key].unknown

    def value(self, key: str) -> object:
        """Return the value of `key`: the user's, else the trainer's default, else None."""
        return self.given[key].value if self.is_given(key) else self.defaults.get(key)

    def matching(self, pattern: str) -> Iterator[Setting]:
        """Yield the settings that the user gave whose key matches `pattern`, with `*` for any text."""
        return (setting for key, setting in self.given.items() if fnmatchcase(key, pattern))

    def flag(self, key: str) -> bool:
        """Return a boolean; None counts as false."""
        return self._typed(key, _to_flag, "true or false") or False

    def whole(self, key: str) -> int | None:
        """Return a whole number or None."""
        return self._typed(key, _to_whole, "a whole number")

    def number(self, key: str) -> float | None:
        """Return a number or None."""
        return self._typed(key, _to_number, "a number")

    def text(self, key: str) -> str | None:
        """Return a text or None. A value with unknown expansions is returned as it is written."""
        given = self.given.get(key)
        if given is not None and given.unknown:
            return str(given.value)
        return self._typed(key, _to_text, "a text")

    def texts(self, key: str) -> list[str]:
        """Return the texts of a list; a single text is a list of one, None is empty."""
        given = self.given.get(key)
        value = given.value if given is not None else self.defaults.get(key)
        if value is None:
            return []
        return [str(item) for item in value] if isinstance(value, list) else [str(value)]

    def origin(self, key: str) -> str:
        """Return where `key` was given, or an empty text for a default."""
        return self.given[key].origin if key in self.given else ""

    def _typed(self, key: str, convert: Callable[[object], T | None], needed: str) -> T | None:
        value = self.value(key)
        if value is None or value == "":
            return None
        converted = convert(value)
        if converted is None:
            at = f"{self.origin(key)}: " if self.origin(key) else ""
            raise ConfigError(f"{at}{key} needs {needed}, got {value!r}")
        return converted


def _to_flag(value: object) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}.get(value.lower())
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return None


def _to_whole(value: object) -> int | None:
    number = _to_number(value)
    return int(number) if number is not None and number.is_integer() else None


def _to_number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(str(value).replace("_", "")) if isinstance(value, str) else None
    except ValueError:
        return None


def _to_text(value: object) -> str | None:
    return None if isinstance(value, list | dict | bool) else str(value)
