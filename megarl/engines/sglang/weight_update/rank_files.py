"""Files that an engine's host exchanges with the TP ranks of one node, in a private folder of that node.

host                                          TP rank r of the node
share("spec", content) ---------------------> reads the path that its command names
                                              writes <prefix>.<r>.checked, then the reply <prefix>.<r>
states(5), take_replies(5) <----------------- prefix: reply_prefix(folder, 5)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.engines.sglang.weight_update.messages import Reply, checked_path, read_reply, reply_path

ReplyState = Literal["missing", "checked", "replied"]
"""What a TP rank has done about a command. `checked`: it waits for the other ranks, to write if all of them can."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The folder of one node."""

    folder: str
    ranks: range
    """TP ranks of the node."""

    def share(self, name: str, content: bytes) -> str:
        """Write a file for the TP ranks; return its path."""
        path = Path(self.folder) / name
        path.write_bytes(content)
        return str(path)

    def remove(self, name: str) -> None:
        """Remove a shared file."""
        (Path(self.folder) / name).unlink(missing_ok=True)

    def states(self, number: int) -> list[ReplyState]:
        """Return the state of each of the node's ranks for command `number`."""
        prefix = reply_prefix(self.folder, number)
        return [
            "replied"
            if reply_path(prefix, rank).exists()
            else "checked"
            if checked_path(prefix, rank).exists()
            else "missing"
            for rank in self.ranks
        ]

    def take_replies(self, number: int) -> list[Reply | None]:
        """Return the replies of the node's ranks to command `number`, None for a missing one; removes the files."""
        prefix = reply_prefix(self.folder, number)
        replies = [read_reply(reply_path(prefix, rank)) for rank in self.ranks]
        for rank in self.ranks:
            reply_path(prefix, rank).unlink(missing_ok=True)
            checked_path(prefix, rank).unlink(missing_ok=True)
        return replies


def reply_prefix(folder: str, number: int) -> str:
    """Return the `reply` of command `number` for the ranks of the node that has the folder."""
    return str(Path(folder) / f"reply-{number}")


def find_unresponsive(states: Sequence[ReplyState]) -> list[int]:
    """Return the TP ranks that have not replied; if some of them wait for others, only those others.

    Args:
        states: by TP rank.
    """
    late = [rank for rank, state in enumerate(states) if state != "replied"]
    return [rank for rank in late if states[rank] == "missing"] or late
