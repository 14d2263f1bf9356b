"""Settings of another trainer's run, and declarative tables of its keys.

A table says what each key is in megarl, or why it has no equivalent. Both `megarl import` and the tables of
docs/coming-from.md come from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

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


type Convert = Callable[[Settings], Mapping[str, object]]
"""Returns values by megarl key; an empty mapping where megarl's default is meant.

May raise NotConvertible with the reason why the settings have no equivalent.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Keys of the other trainer that belong together, and what becomes of them."""

    keys: tuple[str, ...]
    """Keys of the other trainer; `*` stands for any text."""
    kind: Literal["mapped", "no_effect", "missing", "refused"]
    """`mapped`: has an equivalent. `no_effect`: needs none, megarl always does it, or it changes no result. `missing`:
    has no equivalent, and the run differs. `refused`: the run would train something else, and is not converted."""
    to: tuple[str, ...] = ()
    """megarl keys that the row may write; `NAME` stands for a name of the user's."""
    note: str = ""
    """What to know, as Markdown; for other kinds than `mapped` the reason."""
    convert: Convert | None = None
    """None: another row reads the keys."""
    always: bool = False
    """Convert the trainer's default too where no key is given, because it changes results."""
    off: tuple[object, ...] = (None, False, 0, "", "disabled")
    """For `missing` and `refused`: values that turn the feature off, with which the key has no effect."""

    def matches(self, key: str) -> bool:
        """Whether `key` is one of the row's."""
        return any(fnmatchcase(key, pattern) for pattern in self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that has another meaning in megarl, in settings for which `applies`."""

    text: str
    applies: Callable[[Settings], bool] = field(default=lambda _: True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTable:
    """All that is known of one trainer."""

    name: str
    """As users write it: verl."""
    repository: str
    versions: str
    """Versions that the keys were read in, as Markdown."""
    topics: Mapping[str, Sequence[Row]]
    """Heading in the documentation -> rows. The first row that names a key exactly wins, then the first pattern."""
    defaults: Mapping[str, object]
    """Defaults of the trainer, for keys that rows read."""
    differences: Sequence[Difference]
    command: str = "train"
    """The command of megarl that the configuration is for."""
    abbreviations: Mapping[str, str] = field(default_factory=dict)
    """Prefix of keys -> its abbreviation in the documentation."""

    def rows(self) -> list[Row]:
        """Return the rows of all topics, in order."""
        return [row for rows in self.topics.values() for row in rows]

    def find(self, key: str) -> Row | None:
        """Return the row of a key, or None if the key is not known."""
        rows = self.rows()
        exact = next((row for row in rows if key in row.keys), None)
        return exact or next((row for row in rows if row.matches(key)), None)


def mapped(
    keys: str | Sequence[str], to: str | Sequence[str], convert: Convert, note: str = "", *, always: bool = False
) -> Row:
    """Make a row whose values `convert` computes."""
    return Row(keys=_tuple(keys), kind="mapped", to=_tuple(to), convert=convert, note=note, always=always)


def whole(key: str, to: str, note: str = "", *, always: bool = False) -> Row:
    """Make a row for a whole number that is the same in megarl; null is left to megarl's default."""
    return mapped(key, to, lambda s: _unless_none(to, s.whole(key)), note, always=always)


def number(key: str, to: str, note: str = "", *, always: bool = False) -> Row:
    """Make a row for a number that is the same in megarl; null is left to megarl's default."""
    return mapped(key, to, lambda s: _unless_none(to, s.number(key)), note, always=always)


def flag(key: str, to: str, note: str = "", *, always: bool = False) -> Row:
    """Make a row for a boolean that is the same in megarl."""
    return mapped(key, to, lambda s: {to: s.flag(key)}, note, always=always)


def below(prefix: str, to: str, note: str = "") -> Row:
    """Make a row for a map of any keys that megarl has at `to`, with the same keys; null is left out."""

    def convert(s: Settings) -> Mapping[str, object]:
        given = {setting.key.removeprefix(f"{prefix}."): setting.value for setting in s.matching(f"{prefix}.*")}
        return {f"{to}.{name}": value for name, value in given.items() if value is not None}

    return mapped(f"{prefix}.*", to, convert, note)


def text(key: str, to: str, note: str = "", *, always: bool = False) -> Row:
    """Make a row for a text that is the same in megarl; null is left to megarl's default."""
    return mapped(key, to, lambda s: _unless_none(to, s.text(key)), note, always=always)


def read_elsewhere(keys: str | Sequence[str], to: str | Sequence[str], note: str = "") -> Row:
    """Make a row for keys that the converter of another row reads."""
    return Row(keys=_tuple(keys), kind="mapped", to=_tuple(to), note=note)


def no_effect(keys: str | Sequence[str], reason: str) -> Row:
    """Make a row for keys that change no result, or that say what megarl always does."""
    return Row(keys=_tuple(keys), kind="no_effect", note=reason)


def missing(keys: str | Sequence[str], reason: str, *, off: Sequence[object] = (None, False, 0, "", "disabled")) -> Row:
    """Make a row for keys without an equivalent; with a value of `off`, or the trainer's default, they are ignored."""
    return Row(keys=_tuple(keys), kind="missing", note=reason, off=tuple(off))


def refused(keys: str | Sequence[str], reason: str, *, off: Sequence[object] = (None, False, 0, "", "disabled")) -> Row:
    """Make a row for keys with which megarl would train something else, so that nothing is converted."""
    return Row(keys=_tuple(keys), kind="refused", note=reason, off=tuple(off))


def _tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _unless_none(key: str, value: object) -> Mapping[str, object]:
    return {} if value is None else {key: value}
