"""x_k = b_k + a_k x_{k+1} for all k at once. Shapes: K elements; R chunks of C elements.

Chunks are columns, so that one step of a loop over the C places of a chunk works on R numbers that lie side by side:

    0 3 6 9     b of 11 elements, C = 3, filled up at the end
    1 4 7 10    each column is solved from its foot as if nothing followed, and each a becomes the product of those from
    2 5 8 .     its place to the foot

x in the first row is the same kind of recurrence over R elements, solved by doubling: log2(R) steps, each of which
looks twice as far ahead as the one before. What the columns gave lacks only product * x at the head of the next column.

So the work grows with K + R log R and the loops are C and log2(R) long. Nothing is divided: factors of 0, where a
sequence ends, and of 1 are as good as any.
"""

from __future__ import annotations

from torch import Tensor

CHUNK = 32
"""C: long loops over short rows cost as much as short loops over long ones."""


def in_columns(values_K: Tensor) -> Tensor:
    """[C, R] a chunk to a column, the last one filled up with the last element; there must be one."""
    full, rest = divmod(len(values_K), CHUNK)
    columns_CR = values_K.new_empty(CHUNK, full + (rest > 0))
    columns_CR[:, :full] = values_K[: full * CHUNK].view(full, CHUNK).t()
    columns_CR[:rest, full:] = values_K[full * CHUNK :, None]
    columns_CR[rest:, full:] = values_K[-1]
    return columns_CR


def place_in_columns(k: Tensor, num: int) -> Tensor:
    """Where element k of `num`, or of what fills up the last chunk, stands in the flattened [C, R]."""
    return k % CHUNK * -(-num // CHUNK) + k // CHUNK


def solve_backwards_(b_CR: Tensor, a_CR: Tensor) -> Tensor:
    """[C, R] x with x_k = b_k + a_k x_{k+1}, nothing behind the last element; overwrites `b_CR` with it, and `a_CR`."""
    b_rows, a_rows = b_CR.unbind(), a_CR.unbind()
    for place in reversed(range(len(b_rows) - 1)):
        b_rows[place].addcmul_(a_rows[place], b_rows[place + 1])
        a_rows[place].mul_(a_rows[place + 1])
    heads_R = _doubled(b_rows[0], a_rows[0])
    b_CR[:, :-1].addcmul_(a_CR[:, :-1], heads_R[1:])
    return b_CR


def _doubled(b_R: Tensor, a_R: Tensor) -> Tensor:
    """[R] the same for one row."""
    x_R, product_R, step = b_R.clone(), a_R[:-1], 1
    while step < len(x_R):
        x_R[:-step].addcmul_(product_R, x_R[step:].clone())
        product_R, step = product_R[:-step] * product_R[step:], 2 * step
    return x_R
