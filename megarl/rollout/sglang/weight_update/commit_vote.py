"""A vote of an engine's TP ranks: a rank writes weights only if all ranks can.

rank 0: check -- yes --.
rank 1: check -- no ---+--> minimum of all votes: no rank writes
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist


class CommitVote:
    """One rank's part in one vote. Every rank must vote exactly once; otherwise the others wait for it."""

    def __init__(self, group: dist.ProcessGroup | None, checked_file: Path) -> None:
        """Args:
        group: process group of the TP ranks for CPU tensors; None for a single rank.
        checked_file: created when this rank starts to wait for the others, so that the host knows who is missing.
        """
        self._group, self._checked_file = group, checked_file
        self.has_voted = False

    def all_ready(self, ready: bool) -> bool:
        """Vote, and return whether every rank is ready.

        The timeout is that of the process group. If a rank dies, the engine ends too; a stopped rank is waited for. A
        shorter timeout would break the group's connections, and with them an engine that may recover.
        """
        assert not self.has_voted, "a rank must vote only once"
        self.has_voted = True
        if self._group is None:
            return ready
        with contextlib.suppress(OSError):  # a failure must not prevent this rank from voting
            self._checked_file.touch()
        vote = torch.tensor([ready], dtype=torch.uint8)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())
