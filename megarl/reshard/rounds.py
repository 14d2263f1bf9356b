"""Cuts a plan into rounds that fit a bucket, the same cut on every rank.

A round moves at most `bucket_bytes` into any rank and out of any rank. In a rank's bucket, what it holds itself comes
first, then what each source sends, source after source:

    bucket of rank 2     | own boxes | from rank 0 | from rank 3 |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megarl.reshard.bucket import ALIGNMENT, torch_dtype
from megarl.reshard.layout import Box
from megarl.reshard.plan import Move


@dataclass(frozen=True, slots=True)
class Round:
    """The moves of one round that concern one rank."""

    sends: dict[int, tuple[Move, ...]]
    """By destination, in the order in which they are packed."""
    receives: dict[int, tuple[Move, ...]]
    """By source, likewise; the rank itself first, for what it holds."""

    @property
    def offsets(self) -> dict[int, int]:
        """By source, where its boxes start in the bucket."""
        out, end = {}, 0
        for source, moves in self.receives.items():
            out[source] = end
            end += -(-message_bytes(moves) // ALIGNMENT) * ALIGNMENT
        return out

    @property
    def bucket_bytes(self) -> int:
        """What the bucket takes, alignment included."""
        return sum(-(-message_bytes(moves) // ALIGNMENT) * ALIGNMENT for moves in self.receives.values())

    @property
    def bytes_in(self) -> int:
        """From other ranks."""
        return sum(m.num_bytes for moves in self.receives.values() for m in moves if not m.is_local)

    @property
    def bytes_out(self) -> int:
        """To other ranks."""
        return sum(message_bytes(moves) for moves in self.sends.values())


def message_bytes(moves: Sequence[Move]) -> int:
    """Of one message, or of what a rank keeps for itself."""
    return sum(move.num_bytes for move in moves)


def cut_rounds(moves: Sequence[Move], rank: int, bucket_bytes: int) -> list[Round]:
    """Rank `rank`'s rounds; every rank has the same number of them, empty ones included."""
    return [
        _arrange([move for move in of_round if rank in (move.source, move.destination)], rank)
        for of_round in cut_moves(moves, bucket_bytes)
    ]


def cut_moves(moves: Sequence[Move], bucket_bytes: int) -> Iterator[list[Move]]:
    """The moves of all ranks, round after round."""
    of_round: list[Move] = []
    into: dict[int, int] = defaultdict(int)
    out_of: dict[int, int] = defaultdict(int)
    for move in _split_large(moves, bucket_bytes):
        full = into[move.destination] + move.num_bytes > bucket_bytes
        if full or (not move.is_local and out_of[move.source] + move.num_bytes > bucket_bytes):
            yield of_round
            of_round = []
            into.clear()
            out_of.clear()
        into[move.destination] += move.num_bytes
        if not move.is_local:
            out_of[move.source] += move.num_bytes
        of_round.append(move)
    yield of_round


def _arrange(moves: Sequence[Move], rank: int) -> Round:
    sends: dict[int, list[Move]] = defaultdict(list)
    receives: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        if move.destination == rank:
            receives[move.source].append(move)
        elif move.source == rank:
            sends[move.destination].append(move)
    for message in (*sends.values(), *receives.values()):
        # wide elements first: every box then starts at a multiple of its element's size
        message.sort(key=lambda move: -torch_dtype(move.dtype).itemsize)
    own_first = sorted(receives, key=lambda source: (source != rank, source))
    return Round(
        {to: tuple(sends[to]) for to in sorted(sends)}, {source: tuple(receives[source]) for source in own_first}
    )


def _split_large(moves: Sequence[Move], bucket_bytes: int) -> Iterator[Move]:
    """Moves that do not fit a bucket in parts along their first dimension (a single row travels whole)."""
    for move in moves:
        if move.num_bytes <= bucket_bytes:
            yield move
            continue
        rows = move.box[0][1] - move.box[0][0]
        row_bytes = move.num_bytes // rows
        step = max(1, bucket_bytes // row_bytes)
        for first in range(0, rows, step):
            last = min(rows, first + step)
            yield replace(
                move,
                box=_rows(move.box, first, last),
                source_box=_rows(move.source_box, first, last),
                local_box=_rows(move.local_box, first, last),
                num_bytes=(last - first) * row_bytes,
            )


def _rows(box: Box, first: int, last: int) -> Box:
    start = box[0][0]
    return ((start + first, start + last), *box[1:])
