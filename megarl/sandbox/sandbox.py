"""Interface of sandboxes: a program runs on inputs, and outputs come out; nothing that it is compared with goes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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
    """Source that is executed before the program, for cases with calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out of a program on one input. All texts are data of the program, which may have forged them."""

    status: Status
    stdout: str = ""
    stderr: str = ""
    value: str = ""
    """The value of a call as a Python literal; empty without one."""


class Interpreter(Protocol):
    """A Python interpreter in a sandbox, which keeps its variables from cell to cell."""

    def run(self, source: str) -> Outcome:
        """Return the outcome of a cell. After one that ended neither `ok` nor with `error`, variables are lost.

        Raises:
            SandboxError: the sandbox could not be started or was lost.
        """
        ...

    def close(self) -> None:
        """End the interpreter and all of its processes."""
        ...


class Sandbox(Protocol):
    """Runs programs. Its methods block; threads may share it."""

    def run(self, program: Program) -> list[Outcome]:
        """Return the outcomes of the program's cases.

        Raises:
            SandboxError: the sandbox could not be started or was lost, which says nothing about the program.
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
