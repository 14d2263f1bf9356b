"""Vectorized solution of the linear recurrence x_k = b_k + a_k x_{k+1}. Shapes: K elements; R chunks of C elements.

Chunks are stored as columns, so that each step of a loop over the C rows works on R contiguous numbers:

    0 3 6 9     b of 11 elements, C = 3, padded at the end
    1 4 7 10    first, each column is solved from bottom to top as if nothing followed; each a becomes the product of
    2 5 8 .     the factors from its row to the bottom of its column

Then the first row is again a recurrence over R elements. It is solved by doubling: log2(R) steps, each of which looks
twice as far ahead as the previous one. Finally, product * (x at the top of the next column) is added to each element.

The work is O(K + R log R), in loops of length C and log2(R). There are no divisions: factors of 0 (at the end of a
sequence) and 1 are exact.
"""

from __future__ import annotations

from torch import Tensor

CHUNK = 32
"""C, the chunk length: a trade-off between the length of the loop and of the rows."""


def to_columns(values_K: Tensor) -> Tensor:
    """[C, R] values with one chunk per column; the last one is padded with the last element. K is at least 1."""
    full, rest = divmod(len(values_K), CHUNK)
    columns_CR = values_K.new_empty(CHUNK, full + (rest > 0))
    columns_CR[:, :full] = values_K[: full * CHUNK].view(full, CHUNK).t()
    columns_CR[:rest, full:] = values_K[full * CHUNK :, None]
    columns_CR[rest:, full:] = values_K[-1]
    return columns_CR


def column_index(k: Tensor, num: int) -> Tensor:
    """Index in the flattened [C, R] of element k of `num`; k >= `num` addresses the padding."""
    return k % CHUNK * -(-num // CHUNK) + k // CHUNK


def solve_backwards_(b_CR: Tensor, a_CR: Tensor) -> Tensor:
    """[C, R] solution x of x_k = b_k + a_k x_{k+1}, x = 0 after the last element. In place: overwrites both inputs."""
    b_rows, a_rows = b_CR.unbind(), a_CR.unbind()
    for place in reversed(range(len(b_rows) - 1)):
        b_rows[place].addcmul_(a_rows[place], b_rows[place + 1])
        a_rows[place].mul_(a_rows[place + 1])
    heads_R = _solve_by_doubling(b_rows[0], a_rows[0])
    b_CR[:, :-1].addcmul_(a_CR[:, :-1], heads_R[1:])
    return b_CR


def _solve_by_doubling(b_R: Tensor, a_R: Tensor) -> Tensor:
    """[R] solution of the same recurrence within one row; overwrites nothing."""
    x_R, product_R, step = b_R.clone(), a_R[:-1], 1
    while step < len(x_R):
        x_R[:-step].addcmul_(product_R, x_R[step:].clone())
        product_R, step = product_R[:-step] * product_R[step:], 2 * step
    return x_R
