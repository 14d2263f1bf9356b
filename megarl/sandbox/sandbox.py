"""Interface of sandboxes: a program runs on inputs, and outputs come out; nothing that it is compared with goes in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

Status = Literal["ok", "error", "timeout", "memory", "output", "killed", "exit"]
"""How a program ended: with exit code 0; with another or an exception; at the limit of time, of memory or of its
output; by a signal. `exit`: an interpreter has ended without finishing its cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One input of a program."""

    stdin: str = ""
    """Text that the program reads."""
    call: str | None = None
    """Python expression whose value is wanted, such as a call of a function that the program defines; None: the program
    runs as `__main__`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A Python program and its inputs; it runs once for each, in a new process."""

    source: str
    cases: Sequence[Case]
    setup: str = ""
    """Source that is executed after the program and before the call, for cases with calls."""
    seconds: float = math.inf
    """Time of all cases together; those that it does not suffice for have the status `timeout`."""
    output_bytes: int = 0
    """Bytes of output that the program may write where the limit of the sandbox is lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out of a program on one input. All texts are data of the program, which may have forged them."""

    status: Status
    stdout: str = ""
    stderr: str = ""
    value: str = ""
    """The value of a call as a Python literal; empty without one."""


def read_outcome(reply: object) -> Outcome:
    """Return an outcome from its JSON object.

    Raises:
        ValueError: it is none.
    """
    if isinstance(reply, dict) and reply.get("status") in get_args(Status):
        texts: dict[str, Any] = {name: reply.get(name, "") for name in ("stdout", "stderr", "value")}
        if all(isinstance(text, str) for text in texts.values()):
            return Outcome(status=reply["status"], **texts)
    raise ValueError(f"an outcome needs a status, and texts, got {str(reply)[:200]}")


class Interpreter(Protocol):
    """A Python interpreter in a sandbox, which keeps its variables from cell to cell."""

    def run(self, source: str) -> Outcome:
        """Return the outcome of a cell. After one that ended neither `ok` nor with `error`, variables are lost.

        The next cell has a new interpreter then, and a new sandbox where the cell has ended that too.

        Raises:
            SandboxError: the sandbox could not be started, or was lost for a reason outside of it.
        """
        ...

    def close(self) -> None:
        """End the interpreter and all of its processes."""
        ...


class Sandbox(Protocol):
    """Runs programs. Its methods block; threads may share it."""

    def run(self, program: Program, *, until: Callable[[int, Outcome], bool] | None = None) -> list[Outcome]:
        """Return the outcomes of the program's cases.

        Args:
            program: the program.
            until: gets the index and the outcome of a case, here on the host, and returns whether to leave out the
                cases after it.

        Raises:
            SandboxError: the sandbox could not be started, or was lost for a reason outside of it, which says nothing
                about the program. What a program does to its sandbox is its outcome.
        """
        ...

    def open_interpreter(self) -> Interpreter:
        """Start an interpreter.

        Raises:
            SandboxError: the sandbox could not be started.
        """
        ...

    def close(self) -> None:
        """Release what the sandbox holds."""
        ...


FENCE = "```"
LABELS = ("python", "python3", "py", "py3")


def find_code(text: str) -> str | None:
    """Return the last block labelled as Python; without one, the last block that has no label; None without both.

    A block begins behind a line that ends in backticks and a label, and ends at a line that begins or ends with
    backticks. Blocks of another label, and backticks within a line, are text. Takes time in proportion to the text.
    """
    labelled: str | None = None
    unlabelled: str | None = None
    label: str | None = None  # of the block that is open
    lines = list[str]()
    for line in text.split("\n"):
        stripped = line.strip()
        if label is not None and not stripped.startswith(FENCE) and not stripped.endswith(FENCE):
            lines.append(line)
            continue
        opened = _opened_label(stripped, is_inside=label is not None)
        if label is not None:
            if not stripped.startswith(FENCE):
                lines.append(line.rstrip().rstrip("`"))
            code = "".join(f"{each}\n" for each in lines)
            if label in LABELS:
                labelled = code
            elif not label:
                unlabelled = code
        label, lines = opened, []
    return unlabelled if labelled is None else labelled


def _opened_label(line: str, *, is_inside: bool) -> str | None:
    """Return the label, in lower case, of the block that begins behind a line; None: it begins none.

    Inside a block, backticks without a label end it. Behind other text, a label has no spaces.
    """
    before, fence, after = line.rpartition(FENCE)
    before, label = before.rstrip("`"), after.strip().lower()
    if not fence or FENCE in before or (is_inside and not label):
        return None
    if before.strip("> \t"):
        return label if not is_inside and len(label.split()) <= 1 else None
    return label.partition(" ")[0]
