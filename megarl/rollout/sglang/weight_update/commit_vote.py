"""The TP ranks of an engine agree that all of them can write, before any of them does.

rank 0: check -- yes --.
rank 1: check -- no ---+--> the least of all votes: nobody writes
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist


class Ballot:
    """One rank's part in one vote: every rank votes once, or the others wait for it."""

    def __init__(self, group: dist.ProcessGroup | None, mark: Path) -> None:
        """Args:
        group: of the TP ranks, for tensors in host memory; None for a rank on its own.
        mark: a file that is made once this rank waits for the others, so that the host can tell who is missing.
        """
        self._group, self._mark = group, mark
        self.cast = False

    def agree(self, ready: bool) -> bool:
        """Whether every rank is ready.

        It waits as long as the group does. A rank that dies takes the engine with it, and a rank that is stopped is
        waited for: a shorter limit would break the group's connections, and with them an engine that may recover.
        """
        assert not self.cast, "a rank has one vote"
        self.cast = True
        if self._group is None:
            return ready
        with contextlib.suppress(OSError):  # it must not keep this rank from voting
            self._mark.touch()
        vote = torch.tensor([ready], dtype=torch.uint8)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())
