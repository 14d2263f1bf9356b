"""Reading of bash scripts: variables, arrays, quotes and arithmetic are expanded, and nothing is executed.

Commands are read from top to bottom. Of `if`, `case` and loops every branch is read as if it ran once, in order, so
that the last assignment wins. Output of commands, `$(...)`, and variables from outside the script are unknown: they
stay in a word as they are written, and `Word.unknown` names them.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.errors import ConfigError, DataError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^]]*\])?(\+?)=")
HEREDOC = re.compile(r"<<(-?)\s*(['\"\\]?)([A-Za-z_][A-Za-z0-9_]*)['\"]?")
OWN_FOLDER = re.compile(r"dirname\b.*(BASH_SOURCE|\$0|\$\{0\})", re.DOTALL)
"""A command substitution that gives the script's own folder."""

KEYWORDS = frozenset(
    {"if", "then", "elif", "else", "fi", "while", "until", "do", "done", "case", "esac", "{", "}", "!"}
)
DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
SEPARATORS = (";;", "&&", "||", "|&", ";", "|", "&", "\n", "(", ")")
MAX_COMMANDS = 20_000

OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
}
"""Operators of arithmetic expansions; bash divides towards 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word of a command after expansion."""

    text: str
    file: str
    """Name of the script in which the word, or the array element that it comes from, is written."""
    line: int
    """Line on which it begins, from 1."""
    unknown: tuple[str, ...] = ()
    """Expansions in `text` whose values only a run of the script would give, as they are written: `$1`, `$(date)`."""

    @property
    def where(self) -> str:
        """The place of the word, `<file>:<line>`, to start a message with."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """The command of a script that starts the trainer."""

    words: tuple[Word, ...]
    """All words of the command: interpreter, entry point, arguments."""
    entry: int
    """Index of the word that names the entry point."""
    notes: tuple[str, ...] = ()
    """Sentences about what was not read as bash would run it."""

    @property
    def arguments(self) -> tuple[Word, ...]:
        """Words after the entry point."""
        return self.words[self.entry + 1 :]


def find_launch_command(
    text: str,
    origin: Path,
    is_entry: Callable[[str], bool],
    *,
    variables: Mapping[str, str] | None = None,
) -> LaunchCommand:
    """Return the command of a bash script that starts the trainer; of several, the last.

    Args:
        text: the script.
        origin: its path; scripts that it sources are read from there.
        is_entry: whether a word names the trainer's entry point, such as `verl.trainer.main_ppo` or `train.py`.
        variables: values of environment variables, such as those that the script would be started with.

    Raises:
        DataError: a quote or parenthesis is not closed.
        ConfigError: no command has the entry point.
    """
    script = _Script(origin=origin, is_entry=is_entry, variables={k: _known(v) for k, v in (variables or {}).items()})
    script.read(text, line=1)
    if not script.launches:
        raise ConfigError(f"{origin}: no command of the script starts the trainer")
    lines = [str(words[entry].line) for words, entry in script.launches]
    if len(lines) > 1:
        script.notes.append(
            f"{origin} starts the trainer on lines {', '.join(lines)}: the command of line {lines[-1]} was read"
        )
    words, entry = script.launches[-1]
    return LaunchCommand(words=words, entry=entry, notes=tuple(script.notes))


@dataclass(frozen=True, slots=True)
class _Text:
    """Value of a variable or expansion: its text, and the expansions in it that are unknown."""

    text: str
    unknown: tuple[str, ...] = ()


def _known(text: str) -> _Text:
    return _Text(text)


@dataclass(slots=True)
class _Piece:
    """Part of a word: whether its blanks separate words, and which elements it has if it is `"${A[@]}"`."""

    value: _Text
    splits: bool = False
    elements: Sequence[Word] | None = None


@dataclass(slots=True, kw_only=True)
class _Script:
    """State of one reading."""

    origin: Path
    is_entry: Callable[[str], bool]
    variables: dict[str, _Text]
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    launches: list[tuple[tuple[Word, ...], int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    commands: int = 0
    depth: int = 0

    def read(self, text: str, *, line: int) -> None:
        """Read the commands of `text`, whose first line has number `line`."""
        reader = _Reader(self, text, line)
        while (words := reader.command()) is not None:
            self.commands += 1
            if self.commands > MAX_COMMANDS:
                raise DataError(f"{self.origin}:{reader.line}: the script has more than {MAX_COMMANDS} commands")
            self._take(words)

    def _take(self, words: list[Word]) -> None:
        while words and words[0].text in KEYWORDS:
            words = words[1:]
        if not words:
            return
        if words[0].text in ("source", ".") and len(words) > 1:
            self._source(words[1])
            return
        found = [i for i, word in enumerate(words) if self.is_entry(word.text)]
        if found:
            self.launches.append((tuple(words), found[0]))
            return
        first = words[0].text
        if self.launches and (first.startswith("-") or "=" in first):
            self.notes.append(
                f"{words[0].where}: {first} begins a command of its own, because the line before does not "
                "end with a backslash, and was not read"
            )
        for word in words[1:]:  # bash -c "python3 ...", eval "..."
            if " " in word.text and any(self.is_entry(part) for part in word.text.split()):
                self._read_nested(word)

    def _read_nested(self, word: Word) -> None:
        if self.depth == 5:
            return
        self.depth += 1
        self.read(word.text, line=word.line)
        self.depth -= 1

    def _source(self, word: Word) -> None:
        path = Path(word.text)
        path = path if path.is_absolute() else self.origin.parent / path
        if word.unknown or not path.is_file() or self.depth == 5:
            self.notes.append(f"{self.origin}:{word.line}: sources {word.text}, which was not read")
            return
        outer, self.origin = self.origin, path
        self.depth += 1
        self.read(path.read_text(encoding="utf-8", errors="replace"), line=1)
        self.depth -= 1
        self.origin = outer


class _Reader:
    """Tokenizer of one text, which expands words as it reads them."""

    def __init__(self, script: _Script, text: str, line: int) -> None:
        self.script = script
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.line = line
        self.heredocs: list[tuple[str, bool]] = []

    def command(self) -> list[Word] | None:
        """Read up to the next separator; apply assignments, return the other words, or None at the end."""
        words: list[Word] = []
        started = False
        while self.at < len(self.text):
            self._skip_blanks()
            if self.at >= len(self.text):
                break
            if self.text[self.at] == "#":
                self._skip_comment()
                continue
            if self._redirection():
                started = True
                continue
            separator = next((s for s in SEPARATORS if self.text.startswith(s, self.at)), None)
            if separator is not None:
                self._advance(len(separator))
                if separator == "\n":
                    self._skip_heredocs()
                return words
            started = True
            declares = bool(words) and words[0].text in DECLARATIONS
            prefix = not words or declares or all(word.text in KEYWORDS for word in words)
            if prefix and (match := ASSIGNMENT.match(self.text, self.at)):
                self._assign(match)
                continue
            words.extend(self._word())
        return words if started or words else None

    def _assign(self, match: re.Match[str]) -> None:
        name, index, appends = match.group(1), match.group(2), bool(match.group(3))
        self._advance(match.end() - match.start())
        if self.text.startswith("(", self.at):
            elements = self._array()
            self.script.arrays[name] = [*self.script.arrays.get(name, []), *elements] if appends else elements
            return
        value = _joined(self._pieces())
        if index is not None:
            return
        old = self.script.variables.get(name, _known(""))
        if appends:
            value = _Text(old.text + value.text, old.unknown + value.unknown)
        self.script.variables[name] = value
        self.script.arrays.pop(name, None)

    def _array(self) -> list[Word]:
        start = self.line
        self._advance(1)
        elements: list[Word] = []
        while True:
            self._skip_blanks(newlines=True)
            if self.at >= len(self.text):
                raise DataError(f"{self.script.origin}:{start}: the array has no closing parenthesis")
            if self.text[self.at] == ")":
                self._advance(1)
                return elements
            if self.text[self.at] == "#":
                self._skip_comment()
                continue
            elements.extend(self._word())

    def _word(self) -> list[Word]:
        """Read one word; its unquoted expansions are split at blanks, as bash splits them."""
        file, line = self.script.origin.name, self.line
        before = self.at
        fields: list[Word] = []
        text, unknown, begun = "", list[str](), False
        for piece in self._pieces():
            if piece.elements is not None:
                for i, element in enumerate(piece.elements):
                    if i:
                        fields.append(Word(text=text, file=file, line=line, unknown=tuple(unknown)))
                        text, unknown = "", []
                    text, begun, file, line = text + element.text, True, element.file, element.line
                    unknown += element.unknown
                continue
            splits = piece.splits and not piece.value.unknown
            parts = re.split(r"[ \t\n]+", piece.value.text) if splits else [piece.value.text]
            for i, part in enumerate(parts):
                if i and begun:
                    fields.append(Word(text=text, file=file, line=line, unknown=tuple(unknown)))
                    text, unknown, begun = "", [], False
                if part or not splits:
                    text, begun = text + part, True
                    unknown += [name for name in piece.value.unknown if name in part]
        if begun:
            fields.append(Word(text=text, file=file, line=line, unknown=tuple(unknown)))
        if self.at == before:
            self._advance(1)
        return fields

    def _pieces(self) -> list[_Piece]:
        """Read the pieces of one word, up to an unquoted blank or separator."""
        pieces: list[_Piece] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\n;|&()<>":
                if self.text[self.at : self.at + 2] in ("<(", ">("):
                    pieces.append(_Piece(self._unknown(self._until_closed(2))))
                    continue
                break
            if char == "\\":
                if self.text.startswith("\\\n", self.at):
                    self._advance(2)
                    continue
                pieces.append(_Piece(_known(self.text[self.at + 1 : self.at + 2])))
                self._advance(2)
            elif char == "'":
                pieces.append(_Piece(_known(self._single_quoted())))
            elif self.text.startswith("$'", self.at):
                self._advance(1)
                pieces.append(_Piece(_known(self._single_quoted())))
            elif char == '"':
                pieces.extend(self._double_quoted())
            elif char in "$`":
                pieces.append(self._expansion(quoted=False))
            else:
                plain = re.compile(r"[^ \t\n;|&()<>\\'\"$`]+").match(self.text, self.at)
                assert plain is not None
                pieces.append(_Piece(_known(self._own_home(plain.group(), first=not pieces))))
                self._advance(len(plain.group()))
        return pieces

    def _own_home(self, text: str, *, first: bool) -> str:
        home = self.script.variables.get("HOME")
        return home.text + text[1:] if first and home and (text == "~" or text.startswith("~/")) else text

    def _single_quoted(self) -> str:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise DataError(f"{self.script.origin}:{self.line}: a single quote is not closed")
        text = self.text[self.at + 1 : end]
        self._advance(end + 1 - self.at)
        return text

    def _double_quoted(self) -> list[_Piece]:
        start = self.line
        pieces: list[_Piece] = [_Piece(_known(""))]
        self._advance(1)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self._advance(1)
                only_elements = len(pieces) == 2 and pieces[1].elements is not None
                return pieces[1:] if only_elements else pieces
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                escaped = self.text[self.at + 1]
                pieces.append(_Piece(_known("" if escaped == "\n" else escaped)))
                self._advance(2)
            elif char in "$`":
                pieces.append(self._expansion(quoted=True))
            else:
                pieces.append(_Piece(_known(char)))
                self._advance(1)
        raise DataError(f"{self.script.origin}:{start}: a double quote is not closed")

    def _expansion(self, *, quoted: bool) -> _Piece:
        """Expand `$NAME`, `${...}`, `$((...))`, `$(...)` or a command between backquotes."""
        text, at = self.text, self.at
        if text[at] == "`":
            end = text.find("`", at + 1)
            if end < 0:
                raise DataError(f"{self.script.origin}:{self.line}: a backquote is not closed")
            self._advance(end + 1 - at)
            return _Piece(self._command_output(text[at : end + 1]))
        if text.startswith("$((", at):
            body = self._until_closed(1)
            return _Piece(self._arithmetic(body))
        if text.startswith("$(", at):
            return _Piece(self._command_output(self._until_closed(1)))
        if text.startswith("${", at):
            written = self._until_closed(1)
            return self._parameter(written, quoted=quoted)
        if match := NAME.match(text, at + 1):
            self._advance(1 + len(match.group()))
            return self._variable(match.group(), f"${match.group()}", quoted=quoted)
        if at + 1 < len(text) and text[at + 1] in "0123456789@*#?$!-":
            self._advance(2)
            if text[at + 1] in "@*":  # arguments of the script, of which an import has none
                return _Piece(_known(""), splits=True, elements=[] if quoted else None)
            return _Piece(self._unknown(text[at : at + 2]))
        self._advance(1)
        return _Piece(_known("$"))

    def _variable(self, name: str, written: str, *, quoted: bool) -> _Piece:
        if name in self.script.arrays and name not in self.script.variables:
            elements = self.script.arrays[name]
            value = _Text(elements[0].text, elements[0].unknown) if elements else _known("")
            return _Piece(value, splits=not quoted)
        value = self.script.variables.get(name) or self._unknown(written)
        return _Piece(value, splits=not quoted)

    def _parameter(self, written: str, *, quoted: bool) -> _Piece:
        """Expand `${...}`: a name, an array, a default, a removed prefix or suffix, or a replacement."""
        body = written[2:-1]
        if array := re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)\[([@*]|\d+)\]", body):
            return self._elements(array.group(1), array.group(2), quoted=quoted)
        if body.startswith("#"):
            name = re.sub(r"\[[@*]\]$", "", body[1:])
            length = len(self.script.arrays[name]) if name in self.script.arrays else None
            return _Piece(self._unknown(written) if length is None else _known(str(length)))
        match = NAME.match(body)
        if not match:
            if body[:1] in ("@", "*"):
                return _Piece(_known(""), splits=True, elements=[])
            if number := re.match(r"\d+:?-(.*)", body, re.DOTALL):
                return _Piece(self._expand(number.group(1)), splits=not (quoted or number.group(1)[:1] in ("'", '"')))
            return _Piece(self._unknown(written))
        name, rest = match.group(), body[match.end() :]
        value = self.script.variables.get(name)
        if not rest:
            return self._variable(name, written, quoted=quoted)
        operation, argument = re.fullmatch(r"(:?[-=+?]|##|#|%%|%|//|/)?(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
        if operation in (":-", "-", ":=", "="):
            empty = value is None or (operation.startswith(":") and not value.text)
            chosen = self._expand(argument) if value is None or empty else value
            if "=" in operation:
                self.script.variables[name] = chosen
            keeps_blanks = empty and argument.startswith(("'", '"')) and "=" not in operation
            return _Piece(chosen, splits=not quoted and not keeps_blanks)
        if operation in (":+", "+"):
            return _Piece(self._expand(argument) if value and value.text else _known(""), splits=not quoted)
        if operation in (":?", "?"):
            return self._variable(name, f"${{{name}}}", quoted=quoted)
        if value is None or value.unknown or operation is None:
            return _Piece(self._unknown(written), splits=not quoted)
        return _Piece(_known(_edited(value.text, operation, self._expand(argument).text)), splits=not quoted)

    def _elements(self, name: str, index: str, *, quoted: bool) -> _Piece:
        elements: Sequence[Word] = self.script.arrays.get(name, ())
        if name not in self.script.arrays and name in self.script.variables:
            scalar = self.script.variables[name]
            origin = self.script.origin.name
            elements = [Word(text=scalar.text, file=origin, line=self.line, unknown=scalar.unknown)]
        if index.isdigit():
            chosen = elements[int(index)] if int(index) < len(elements) else None
            return _Piece(_Text(chosen.text, chosen.unknown) if chosen else _known(""), splits=not quoted)
        if index == "*" and quoted:
            unknown = tuple(u for element in elements for u in element.unknown)
            return _Piece(_Text(" ".join(element.text for element in elements), unknown))
        return _Piece(_known(""), elements=elements)

    def _expand(self, text: str) -> _Text:
        """Expand the text of a default value."""
        reader = _Reader(self.script, text, self.line)
        pieces: list[_Piece] = []
        while reader.at < len(reader.text):
            if reader.text[reader.at] in " \t\n;|&()<>":
                pieces.append(_Piece(_known(reader.text[reader.at])))
                reader.at += 1
            else:
                pieces.extend(reader._pieces())
        return _joined(pieces)

    def _arithmetic(self, written: str) -> _Text:
        expanded = self._expand(re.sub(r"(?<![\w$}{])([A-Za-z_]\w*)", r"$\1", written[3:-2]))
        value = None if expanded.unknown else evaluate(expanded.text)
        return self._unknown(written) if value is None else _known(str(value))

    def _command_output(self, written: str) -> _Text:
        if OWN_FOLDER.search(written):
            return _known(str(self.script.origin.parent))
        return self._unknown(written)

    def _unknown(self, written: str) -> _Text:
        for name, text in (("HOME", "~"), ("PWD", ".")):
            if written in (f"${name}", f"${{{name}}}"):
                return _known(text)
        return _Text(written, (written,))

    def _until_closed(self, skip: int) -> str:
        """Read a bracketed expansion from `at`, with its brackets, which begin after `skip` characters."""
        start, line = self.at, self.line
        opening = self.text[start + skip if skip == 1 else start + 1]
        closing = {"(": ")", "{": "}"}[opening]
        depth, at, quote = 0, start + skip - (skip == 2), ""
        while at < len(self.text):
            char = self.text[at]
            if char == "\\":
                at += 2
                continue
            if quote:
                quote = "" if char == quote else quote
            elif char in "'\"" and not (char == "'" and opening == "{"):
                quote = char
            elif char == opening:
                depth += 1
            elif char == closing:
                depth -= 1
                if depth == 0:
                    self._advance(at + 1 - start)
                    return self.text[start : at + 1]
            at += 1
        raise DataError(f"{self.script.origin}:{line}: {self.text[start : start + 2]} is not closed by {closing}")

    def _redirection(self) -> bool:
        """Skip a redirection, such as `2>&1` or `> log`; note the word that ends a here-document."""
        heredoc = HEREDOC.match(self.text, self.at)
        if heredoc and not self.text.startswith("<<<", self.at):
            self.heredocs.append((heredoc.group(3), bool(heredoc.group(1))))
            self._advance(heredoc.end() - heredoc.start())
            return True
        match = re.compile(r"\d*(&>>|&>|>>|>&|<<<|<&|>\||>|<)(?!\()").match(self.text, self.at)
        if not match:
            return False
        self._advance(match.end() - match.start())
        self._skip_blanks()
        self._pieces()
        return True

    def _skip_heredocs(self) -> None:
        for word, tabs in self.heredocs:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                content = self.text[self.at : end]
                self._advance(min(end + 1, len(self.text)) - self.at)
                if (content.lstrip("\t") if tabs else content) == word:
                    break
        self.heredocs.clear()

    def _skip_blanks(self, *, newlines: bool = False) -> None:
        while self.at < len(self.text):
            if self.text.startswith("\\\n", self.at):
                self._advance(2)
            elif self.text[self.at] in (" \t\n" if newlines else " \t"):
                self._advance(1)
            else:
                return

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.at)
        self._advance((len(self.text) if end < 0 else end) - self.at)

    def _advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count


def _joined(pieces: Sequence[_Piece]) -> _Text:
    texts = []
    unknown: list[str] = []
    for piece in pieces:
        if piece.elements is None:
            texts.append(piece.value.text)
            unknown += piece.value.unknown
        else:
            texts.append(" ".join(element.text for element in piece.elements))
            unknown += [u for element in piece.elements for u in element.unknown]
    return _Text("".join(texts), tuple(unknown))


def _edited(text: str, operation: str, argument: str) -> str:
    """Apply `#`, `##`, `%`, `%%` (remove a prefix or suffix), `/` or `//` (replace) to `text`."""
    if operation in ("/", "//"):
        pattern, _, replacement = argument.partition("/")
        return re.sub(_glob(pattern), lambda _: replacement, text, count=1 if operation == "/" else 0)
    cuts = range(len(text) + 1)
    if operation in ("#", "##"):
        ends = [i for i in cuts if re.fullmatch(_glob(argument), text[:i], re.DOTALL)]
        return text[(min(ends) if operation == "#" else max(ends)) :] if ends else text
    starts = [i for i in cuts if re.fullmatch(_glob(argument), text[i:], re.DOTALL)]
    return text[: (max(starts) if operation == "%" else min(starts))] if starts else text


def _glob(pattern: str) -> str:
    return "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern)


def evaluate(expression: str) -> int | None:
    """Return the value of an arithmetic expression of whole numbers, or None if it has anything else."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
        case ast.BinOp(left=left, op=ast.Pow(), right=right) if 0 <= _value(right) <= 64:
            return int(_value(left) ** _value(right))
    raise ValueError(ast.dump(node))
