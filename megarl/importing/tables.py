"""Declarative tables of another trainer's keys: what each is in megarl, or why it has no equivalent.

Both `megarl import` and the tables of docs/coming-from.md come from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from megarl.importing.peer_settings import Settings

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
