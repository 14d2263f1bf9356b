"""Apply the table of a trainer to the settings of a run, and write the configuration of megarl.

The configuration comes with an account of every key. `PEERS` has the trainers that `megarl import` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import wrap

from megarl.config.commands import STAGES
from megarl.config.load import format_value, make_config
from megarl.errors import ConfigError, DataError
from megarl.importing.nemo_rl.key_tables import NEMO_RL
from megarl.importing.nemo_rl.yaml_settings import read_run as read_nemo_rl
from megarl.importing.nemo_rl.yaml_settings import table_of as nemo_rl_table_of
from megarl.importing.slime.argument_table import SLIME
from megarl.importing.slime.argument_table import table_of as slime_table_of
from megarl.importing.slime.argument_values import read_run as read_slime
from megarl.importing.tables import Convert, NotConvertible, PeerTable, Refused, Row, Setting, Settings
from megarl.importing.verl.table import VERL
from megarl.importing.verl.table import read_run as read_verl

WIDTH = 100
"""Columns after which lines of comments are wrapped."""

SECTIONS = ("run_dir", "seed", "model", "data", "algorithm", "trainer", "rollout", "schedule", "reward", "eval")
"""Top-level keys in the order of the document; others follow in the order in which they were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One key of the resulting configuration."""

    key: str
    value: object
    sources: tuple[str, ...]
    """Keys of the other trainer that it comes from; empty for its defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmapped:
    """A setting that the resulting configuration does not have, and why."""

    key: str
    value: object
    origin: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Result of an import."""

    peer: str
    command: str
    """The command of megarl that the configuration is for."""
    assignments: Sequence[Assignment]
    unmapped: Sequence[Unmapped]
    """Settings without an equivalent, and unknown ones."""
    without_effect: Sequence[Unmapped]
    """Settings that need no equivalent."""
    unknown: Sequence[Unmapped]
    """Settings whose values only a run of the script would give."""
    differences: Sequence[str]
    notes: Sequence[str]
    problems: Sequence[str]
    """Why `megarl check --offline` would refuse the configuration as it is; empty if it accepts it."""

    def tree(self) -> dict[str, object]:
        """Return the configuration as nested mappings."""
        return make_tree(self.assignments)

    def yaml(self) -> str:
        """Return the configuration as YAML, with a comment on each key, and the account of all settings on top."""
        comments = {a.key: _shorten(a.sources) or f"default of {self.peer}" for a in self.assignments}
        account = [line for heading, lines in self._account() for line in _comment_block(heading, lines)]
        return "\n".join([*account, *_yaml_lines(self.tree(), "", comments)]) + "\n"

    def json(self) -> str:
        """Return the configuration and the account as one JSON object."""
        record = asdict(self)
        del record["assignments"]
        sources = {a.key: list(a.sources) for a in self.assignments}
        return json.dumps({"config": self.tree(), "sources": sources, **record}, indent=2, default=str)

    def _account(self) -> Iterator[tuple[str, list[str]]]:
        yield f"Converted from {self.peer} by megarl import, for megarl {self.command}.", []
        yield "To fill in, because only a run of the script would give the values:", _listed(self.unknown)
        yield "Problems that megarl check --offline finds:", list(self.problems)
        yield f"Settings of {self.peer} without an equivalent:", _listed(self.unmapped)
        yield "What differs in meaning:", list(self.differences)
        yield "Notes:", list(self.notes)
        yield "Settings that need no equivalent:", _listed(self.without_effect)


def convert(table: PeerTable, given: Mapping[str, Setting], notes: Sequence[str] = ()) -> Conversion:
    """Convert the settings of a run.

    Raises:
        ConfigError: a value has the wrong type, or settings are refused; names file, line and key.
    """
    account = _Account(table=table, settings=Settings(given, table.defaults))
    of_row: dict[int, list[Setting]] = {}
    for setting in given.values():
        row = table.find(setting.key)
        if row is None:
            account.unmapped.append(_unmapped(setting, f"not known: no key of {table.name} that megarl knows of"))
        else:
            of_row.setdefault(id(row), []).append(setting)
    for row in table.rows():
        account.take(row, of_row.get(id(row), []))
    if account.refusals:
        raise ConfigError("\n".join(dict.fromkeys(account.refusals)))
    kept, problems = drop_defaults(account.with_read_settings(), table.command)
    return Conversion(
        peer=table.name,
        command=table.command,
        assignments=kept,
        unmapped=account.unmapped,
        without_effect=account.without_effect,
        unknown=account.unknown,
        differences=[difference.text for difference in table.differences if difference.applies(account.settings)],
        notes=list(notes),
        problems=problems,
    )


@dataclass(slots=True, kw_only=True)
class _Account:
    """What became of the settings so far."""

    table: PeerTable
    settings: Settings
    assignments: dict[str, Assignment] = field(default_factory=dict)
    unmapped: list[Unmapped] = field(default_factory=list)
    without_effect: list[Unmapped] = field(default_factory=list)
    unknown: list[Unmapped] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    read_by_others: list[tuple[Row, Setting]] = field(default_factory=list)
    """Settings that the converters of other rows read."""

    def take(self, row: Row, of_row: Sequence[Setting]) -> None:
        """Convert or list the settings that the user gave for the keys of a row."""
        self.unknown += [_unmapped(s, f"set by {', '.join(s.unknown)}") for s in of_row if s.unknown]
        known = [setting for setting in of_row if not setting.unknown]
        if row.kind != "mapped":
            for setting in known:
                self._list(row, setting)
        elif row.convert is None:
            self.read_by_others += [(row, setting) for setting in known]
        elif of_row or row.always:
            self._convert(row, row.convert, of_row)

    def with_read_settings(self) -> list[Assignment]:
        """Return the assignments; settings that other rows read are sources of those that their own row names."""
        for row, setting in self.read_by_others:
            written = [key for key in self.assignments if any(key == to or key.startswith(f"{to}.") for to in row.to)]
            for key in written:
                old = self.assignments[key]
                self.assignments[key] = replace(old, sources=(*old.sources, setting.key))
            if not written:
                self.without_effect.append(_unmapped(setting, row.note))
        return list(self.assignments.values())

    def _list(self, row: Row, setting: Setting) -> None:
        if row.kind == "no_effect":
            self.without_effect.append(_unmapped(setting, row.note))
        elif _is_off(row, setting, self.table.defaults):
            self.without_effect.append(_unmapped(setting, f"off or the default: {row.note}"))
        elif row.kind == "missing":
            self.unmapped.append(_unmapped(setting, row.note))
        else:
            self.refusals.append(_refusal(setting, row.note))

    def _convert(self, row: Row, converter: Convert, of_row: Sequence[Setting]) -> None:
        try:
            values = converter(self.settings)
        except NotConvertible as e:
            self.unmapped += self._not_converted(e, row, of_row)
            values = e.values
        except Refused as e:
            default = Setting(key=e.key, value=self.settings.value(e.key), origin=f"default of {self.table.name}")
            self.refusals.append(_refusal(self.settings.given.get(e.key, default), str(e)))
            return
        else:
            if not values:
                reason = "as in megarl by default, or without effect with the other settings"
                self.without_effect += [_unmapped(setting, reason) for setting in of_row if not setting.unknown]
        sources = tuple(setting.key for setting in of_row)
        for key, value in values.items():
            self.assignments[key] = Assignment(key=key, value=_plain(value), sources=sources)

    def _not_converted(self, e: NotConvertible, row: Row, of_row: Sequence[Setting]) -> list[Unmapped]:
        if e.by_key is not None:
            return [_unmapped(self.settings.given[key], reason) for key, reason in e.by_key.items()]
        known = [_unmapped(setting, str(e)) for setting in of_row if not setting.unknown]
        key = row.keys[0]
        return known or [Unmapped(key=key, value=self.settings.value(key), origin="default", reason=str(e))]


def drop_defaults(assignments: Sequence[Assignment], command: str = "train") -> tuple[list[Assignment], list[str]]:
    """Drop what comes from the other trainer's defaults and is megarl's default too; also return all problems."""
    try:
        whole = make_config(STAGES[command], make_tree(assignments))
    except ConfigError as e:
        return list(assignments), str(e).splitlines()
    kept = list(assignments)
    for assignment in assignments:
        if assignment.sources:
            continue
        others = [other for other in kept if other is not assignment]
        try:
            same = make_config(STAGES[command], make_tree(others)) == whole
        except ConfigError:
            same = False
        kept = others if same else kept
    return kept, []


def make_tree(assignments: Sequence[Assignment]) -> dict[str, object]:
    """Return nested mappings, sections in the usual order.

    Raises:
        AssertionError: one key is a section and a value.
    """
    order = {name: i for i, name in enumerate(SECTIONS)}
    tree: dict[str, object] = {}
    for assignment in sorted(assignments, key=lambda a: order.get(a.key.partition(".")[0], len(order))):
        *parents, leaf = assignment.key.split(".")
        node = tree
        for parent in parents:
            below = node.setdefault(parent, {})
            assert isinstance(below, dict), assignment.key
            node = below
        node[leaf] = deepcopy(assignment.value)
    return tree


def _is_off(row: Row, setting: Setting, defaults: Mapping[str, object]) -> bool:
    words: Mapping[object, object] = {"false": False, "true": True, "null": None, "none": None}
    value = setting.value.lower() if isinstance(setting.value, str) else setting.value
    value = words.get(value, value) if isinstance(value, str) else value
    lowered = [off.lower() if isinstance(off, str) else off for off in row.off]
    if any(isinstance(value, bool) == isinstance(off, bool) and value == off for off in lowered):
        return True
    return setting.key in defaults and setting.value == defaults[setting.key]


def _unmapped(setting: Setting, reason: str) -> Unmapped:
    return Unmapped(key=setting.key, value=setting.value, origin=setting.origin, reason=reason)


def _refusal(setting: Setting, reason: str) -> str:
    return f"{setting.origin}: {setting.key}={_short(setting.value)} is refused: {reason}"


def _plain(value: object) -> object:
    """Return whole floats of counts as they are, and sequences as lists."""
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _short(value: object) -> str:
    text = format_value(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _shorten(sources: Sequence[str]) -> str:
    more = f" and {len(sources) - 2} more" if len(sources) > 2 else ""
    return ", ".join(sources[:2]) + more


def _listed(settings: Sequence[Unmapped]) -> list[str]:
    """Return a line for each reason, with all settings that have it."""
    by_reason: dict[str, list[Unmapped]] = {}
    for setting in settings:
        by_reason.setdefault(setting.reason, []).append(setting)
    return [
        f"{', '.join(f'{s.key}={_short(s.value)} ({s.origin})' for s in of_reason)}: {reason}"
        for reason, of_reason in by_reason.items()
    ]


def _comment_block(heading: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return [f"# {heading}", "#"] if heading.endswith(".") else []
    wrapped = [part for line in lines for part in _wrapped(line)]
    return [f"# {heading}", *(f"# {part}" for part in wrapped), "#"]


def _wrapped(line: str) -> list[str]:
    """Return the lines of an item; names of files and arguments are not broken."""
    return wrap(
        line, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _yaml_lines(node: Mapping[str, object], prefix: str, comments: Mapping[str, str], indent: str = "") -> list[str]:
    lines = []
    for name, value in node.items():
        key = f"{prefix}{name}"
        if key not in comments and isinstance(value, dict):
            lines += [f"{indent}{format_value(name)}:", *_yaml_lines(value, f"{key}.", comments, f"{indent}  ")]
        else:
            lines.append(f"{indent}{format_value(name)}: {format_value(value)}  # {comments[key]}")
    return lines


type Reader = Callable[[str, Path, Mapping[str, str]], tuple[Mapping[str, Setting], Sequence[str]]]
"""(text of a file, its path, environment variables) -> the settings it gives by key, and notes on the reading.

Raises ConfigError or DataError with file and line.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A trainer whose runs can be converted."""

    table: PeerTable
    """All keys, as the documentation lists them."""
    read: Reader
    table_of: Callable[[Mapping[str, Setting]], PeerTable] | None = None
    """Returns the table of a run, where it depends on the settings; None: `table`."""


PEERS: Mapping[str, Peer] = {
    "verl": Peer(table=VERL, read=read_verl),
    "slime": Peer(table=SLIME, read=read_slime, table_of=slime_table_of),
    "nemo-rl": Peer(table=NEMO_RL, read=read_nemo_rl, table_of=nemo_rl_table_of),
}


def import_run(peer: str, path: Path, variables: Mapping[str, str]) -> Conversion:
    """Convert the run script or configuration file at `path`; nothing is executed.

    Args:
        variables: values of environment variables that the script refers to.

    Raises:
        DataError: the file cannot be read.
        ConfigError: a value has the wrong type, or has no equivalent without which megarl would train something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise DataError(f"{path}: cannot read the file: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise DataError(f"{path}: not valid UTF-8 at byte {e.start}") from e
    found = PEERS[peer]
    given, notes = found.read(text, path, variables)
    return convert(found.table if found.table_of is None else found.table_of(given), given, notes)
