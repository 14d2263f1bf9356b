"""Vectorized solution of the linear recurrence x_k = b_k + a_k x_{k+1} of many sequences.

Shapes: S sequences of K elements; R chunks of C elements.

Chunks are stored as columns, so that each step of a loop over the C rows works on R contiguous numbers. A sequence
begins a column; the rest of its last column is padding. Two sequences of 8 and 3 elements, with C = 3:

    0 3 6 8     b
    1 4 7 9     first, each column is solved from bottom to top as if nothing followed; each a becomes the product of
    2 5 . 10    the factors from its row to the bottom of its column

Then the first row is again a recurrence over R elements. It is solved by doubling: log2(R) steps, each of which looks
twice as far ahead as the previous one. Finally, product * (x at the top of the next column) is added to each element.

The work is O(K + R log R), in loops of length C and log2(R). There are no divisions: factors of 0 (at the end of a
sequence) and 1 are exact. The result of a sequence has the same bits whatever other sequences are solved with it: its
elements are added in the same order, and products are rounded before they are added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 32
"""C, the chunk length: a trade-off between the length of the loop and of the rows."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Places of the elements of sequences, one after the other, in columns."""

    index_CR: Tensor
    """int64: index of the element at each place, 0 to K - 1; padding repeats the last element of its sequence."""
    is_end_CR: Tensor
    """bool: the last element of each sequence, and padding."""
    sequence_R: Tensor
    """int64: index of the sequence of each column."""

    @classmethod
    def of(cls, count_S: Tensor) -> Columns:
        """Return the places for sequences of these lengths, int64 [S], which may be 0."""
        columns_S = (count_S + (CHUNK - 1)).div(CHUNK, rounding_mode="floor")
        sequence_R = torch.repeat_interleave(columns_S)
        ends_S = count_S.cumsum(0)
        earlier_R = (columns_S.cumsum(0) - columns_S)[sequence_R]
        chunk_R = torch.arange(len(sequence_R), device=count_S.device) - earlier_R
        first_R, last_R = (ends_S - count_S)[sequence_R] + CHUNK * chunk_R, ends_S[sequence_R] - 1
        index_CR = first_R + torch.arange(CHUNK, device=count_S.device)[:, None]
        is_end_CR = index_CR >= last_R
        return cls(torch.minimum(index_CR, last_R, out=index_CR), is_end_CR, sequence_R)


def solve_backwards_(b_CR: Tensor, a_CR: Tensor) -> Tensor:
    """[C, R] solution x of x_k = b_k + a_k x_{k+1}, in place: overwrites both inputs.

    `a_CR` is 0 at the ends of sequences and in the padding.
    """
    b_rows, a_rows = b_CR.unbind(), a_CR.unbind()
    for place in reversed(range(len(b_rows) - 1)):
        b_rows[place].add_(a_rows[place] * b_rows[place + 1])
        a_rows[place].mul_(a_rows[place + 1])
    heads_R = _solve_by_doubling(b_rows[0], a_rows[0])
    b_CR[:, :-1].add_(a_CR[:, :-1].mul_(heads_R[1:]))
    return b_CR


def _solve_by_doubling(b_R: Tensor, a_R: Tensor) -> Tensor:
    """[R] solution of the same recurrence within one row; overwrites nothing."""
    x_R, product_R, step = b_R.clone(), a_R[:-1], 1
    while step < len(x_R):
        x_R[:-step].add_(product_R * x_R[step:])
        product_R, step = product_R[:-step] * product_R[step:], 2 * step
    return x_R
