"""A hostile program of the corpus."""

from __future__ import annotations

import json
from dataclasses import dataclass
from textwrap import dedent

REACHED = "REACHED"
"""What a program prints when it got what it wanted; others print the canary itself."""

PRELUDE = """
import os, sys, ctypes, socket, struct, time, signal, mmap
T = {targets}
libc = ctypes.CDLL(None, use_errno=True)
def reached(condition=True):
    if condition:
        print("REACHED", flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """A program that tries to leave its sandbox, or to use more than it may."""

    name: str
    body: str
    needs_root: bool = False
    """Without a sandbox, it reaches its target only as root."""
    not_outside: str = ""
    """Why it is never run without a sandbox; empty: it is, to show that it works there."""

    def source(self, targets: dict[str, object]) -> str:
        """Return the program, with the targets that a test has set up."""
        return PRELUDE.replace("{targets}", repr(json.loads(json.dumps(targets)))) + dedent(self.body)


def make_attacks(bodies: dict[str, str], *, not_outside: str = "", needs_root: bool = False) -> list[Attack]:
    """Return attacks from name -> body."""
    return [
        Attack(name=name, body=body, not_outside=not_outside, needs_root=needs_root) for name, body in bodies.items()
    ]
