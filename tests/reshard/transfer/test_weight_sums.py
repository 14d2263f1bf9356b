"""Sums of weights against sums of Python integers, and how those of trainer ranks add up to those of engines."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, slices
from megarl.reshard.transfer import weight_sums
from megarl.reshard.transfer.weight_sums import PartTable, add_parts, sum_box
from tests.errors import expect_error

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool]


def random_values(shape, dtype, seed=0):
    """Return values with all bits in use."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul(50).to(dtype)


def weight_of(index, dim):
    """Return the factor of an index in a dimension, counted from the last."""
    return int(weight_sums.random_factors(dim, index, index + 1)[0])


def slow_sum(values, box):
    """Return the sum of a box from its definition, with Python's integers."""
    halves = max(values.element_size() // 2, 1)
    unit = np.uint8 if values.element_size() == 1 else np.int16
    bits = values.contiguous().reshape(-1).view(torch.uint8).numpy().view(unit).reshape(*values.shape, halves)
    total = 0
    for *at, half in np.ndindex(*bits.shape):
        place = [start + n for (start, _), n in zip(box, at, strict=True)]
        random = weight_of(place[-1] * halves + half, 0)
        first, second = weight_sums.HALVES
        weight = (random & 0xFFFFF) * first + ((random >> 40) & 0xFFFFE) * second
        assert weight % 2 == 1
        for dim, index in enumerate(reversed(place[:-1]), start=1):
            weight *= weight_of(index, dim)
        if len(place) == 1:
            weight *= weight_of(0, 1)
        total += int(bits[(*at, half)]) * weight
    return total % 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("box", [((4, 7), (2, 7)), ((9, 15),), ((1, 3), (0, 3), (5, 9))], ids=str)
def test_sums_equal_their_definition(dtype, box, monkeypatch):
    monkeypatch.setattr(weight_sums, "MAX_COLUMNS", 4)
    monkeypatch.setattr(weight_sums, "CHUNK_ELEMENTS", 8)
    values = random_values([stop - start for start, stop in box], dtype)
    assert int(sum_box(values, box)) % 2**64 == slow_sum(values, box)
    transposed = values.mT.contiguous().mT if values.dim() > 1 else values
    assert torch.equal(sum_box(transposed, box), sum_box(values, box))


@given(st.data())
@settings(max_examples=50)
def test_sums_of_parts_add_up(data):
    shape = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=3))
    values = random_values(shape, torch.bfloat16)
    cuts = [sorted({0, data.draw(st.integers(1, n - 1)), n}) for n in shape]
    total = 0
    for number in np.ndindex(*[len(cut) - 1 for cut in cuts]):
        box = tuple((cut[i], cut[i + 1]) for cut, i in zip(cuts, number, strict=True))
        total += int(sum_box(values[slices(box)], box))
    assert (total - int(sum_box(values, tuple((0, n) for n in shape)))) % 2**64 == 0


def test_every_bit_counts_and_so_does_its_place():
    values = random_values((6, 5), torch.float32)
    box = ((3, 9), (0, 5))
    found = {int(sum_box(values, box))}
    bits = values.view(torch.int32)
    for bit in range(32):
        for row, column in ((0, 0), (2, 3), (5, 4)):
            changed = bits.clone()
            changed[row, column] ^= 1 << bit if bit < 31 else -(1 << 31)
            found.add(int(sum_box(changed.view(torch.float32), box)))
    found |= {int(sum_box(values.flip(dim), box)) for dim in (0, 1)}
    found |= {int(sum_box(values.roll(1, dim), box)) for dim in (0, 1)}
    found.add(int(sum_box(values, ((4, 10), (0, 5)))))
    assert len(found) == 1 + 3 * 32 + 2 + 2 + 1


SHAPES = {"w": (8, 3), "v": (5,), "scalar": ()}
TENSORS = {name: TensorSpec(shape, "bfloat16" if name == "v" else "float32") for name, shape in SHAPES.items()}
FULL = {name: random_values(shape, torch.float32, seed) for seed, (name, shape) in enumerate(SHAPES.items())}


def shard(first, last, full=FULL):
    """Return layout and tensors of a rank that holds some rows of `w`, behind two other rows, and all else."""
    local = {**full, "w": torch.cat([torch.zeros(2, 3), full["w"][first:last]])}
    rows = ShardPiece("w", ((first, last), (0, 3)), "w", ((2, 2 + last - first), (0, 3)))
    others = [ShardPiece(name, (box := TENSORS[name].box), name, box) for name in ("v", "scalar")]
    return WeightLayout(TENSORS, (rows, *others)), local


ENGINE = [shard(0, 5)[0], shard(5, 8)[0]]


def sums_of(*ranks):
    return [PartTable(layout, ENGINE).sum(local) for layout, local in ranks]


def test_sums_of_trainer_ranks_add_up_to_those_of_the_pieces_of_engines():
    """Two data-parallel replicas of two ranks; an engine of two, whose bfloat16 vector the trainer has in float32."""
    found = add_parts(ENGINE, sums_of(shard(0, 4), shard(4, 8), shard(0, 4), shard(4, 8)))
    for layout, sums in zip(ENGINE, found, strict=True):
        for piece, total in zip(layout.pieces, sums.tolist(), strict=True):
            values = FULL[piece.tensor].to(torch.bfloat16 if piece.tensor == "v" else torch.float32)
            assert total == int(sum_box(values[slices(piece.box)], piece.box))


def test_replicas_that_differ_are_named():
    other = {**FULL, "w": FULL["w"].clone()}
    other["w"][3, 1] += 1e-5
    with expect_error(WeightSyncError, "0", "2", "w", "different", "trainer"):
        add_parts(ENGINE, sums_of(shard(0, 4), shard(4, 8), shard(0, 4, other)))


def test_what_no_rank_holds_is_an_error():
    with expect_error(WeightSyncError, "w", "[(0", "5)"):
        add_parts(ENGINE, sums_of(shard(0, 4)))
