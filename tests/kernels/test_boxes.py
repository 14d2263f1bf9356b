"""Copies of boxes, and their checksums against splitmix64 on Python numbers."""

import pytest
import torch

from megarl_kernels import BoxTable, checksum_boxes, copy_boxes


def random_bytes(size, seed=0):
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def boxes_of(memory, dtype, offset):
    """Return four boxes of a [10, 64] matrix that starts `offset` elements into the memory."""
    matrix = memory.view(dtype)[offset : offset + 640].view(10, 64)
    return [matrix[1:4, 3:20], matrix[5], matrix[6:9, :7], matrix[9:10, 5:6]]


CASES = [
    (torch.float64, 0, 8),
    (torch.float32, 0, 4),
    (torch.bfloat16, 0, 2),
    (torch.bfloat16, 1, 2),
    (torch.float8_e4m3fn, 3, 1),
]
"""dtype, first element, and the unit by which memory can be read."""


def splitmix64(x):
    x %= 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def plain_checksum(box):
    """Return the documented sum over the words of a box, as int64."""
    total = index = 0
    for row in box.contiguous().view(torch.uint8).reshape(len(box) if box.ndim == 2 else 1, -1):
        data = bytes(row.tolist())
        for start in range(0, len(data), 8):
            index += 1
            total += splitmix64(int.from_bytes(data[start : start + 8], "little") + index * 0x9E3779B97F4A7C15)
    return (total + 2**63) % 2**64 - 2**63


def check_boxes(dtype, offset, unit, device):
    """Boxes are copied with their checksums, and nothing else is written."""
    source = random_bytes(8192).to(device)
    destination, want = (random_bytes(8192, 1).to(device) for _ in range(2))
    table = BoxTable.of(list(zip(*(boxes_of(x, dtype, offset) for x in (source, destination)), strict=True)))
    assert table.unit == unit
    sums = copy_boxes(table, checksum=True)
    for a, b in zip(boxes_of(source, dtype, offset), boxes_of(want, dtype, offset), strict=True):
        b.copy_(a)
    assert torch.equal(destination, want)
    assert sums.tolist() == [plain_checksum(box.cpu()) for box in boxes_of(source, dtype, offset)]
    before = source.clone()
    assert torch.equal(checksum_boxes(boxes_of(source, dtype, offset)), sums)
    assert torch.equal(source, before)
    destination.zero_()
    assert copy_boxes(table) is None
    assert torch.equal(*(boxes_of(x, dtype, offset)[1].view(torch.uint8) for x in (source, destination)))


@pytest.mark.parametrize(("dtype", "offset", "unit"), CASES, ids=str)
def test_boxes_are_copied_and_nothing_else(dtype, offset, unit):
    check_boxes(dtype, offset, unit, "cpu")


def test_checksum_follows_the_content_and_not_the_place():
    memory, packed = random_bytes(8192), torch.zeros(51, dtype=torch.bfloat16).view(3, 17)
    box, *_ = boxes_of(memory, torch.bfloat16, 1)
    table = BoxTable.of([(box, packed)])
    before = copy_boxes(table, checksum=True)
    assert torch.equal(before, copy_boxes(BoxTable.of([(packed, box)]), checksum=True))
    box.view(torch.int16)[2, 16] += 1
    assert copy_boxes(table, checksum=True) != before
    box.view(torch.int16)[2, 16] -= 1
    assert copy_boxes(table, checksum=True) == before
    swapped = box.clone()[[1, 0, 2]]
    assert copy_boxes(BoxTable.of([(swapped, packed)]), checksum=True) != before


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([], "a table of boxes needs at least one"),
        ([(torch.zeros(2, 3), torch.zeros(3, 2))], r"box 0 needs one shape and dtype on cpu, got \[2, 3\]"),
        ([(torch.zeros(2), torch.zeros(2).int())], "got .* torch.float32 on cpu and .* torch.int32 on cpu"),
        ([(torch.zeros(2, 3).t(), torch.zeros(3, 2))], r"contiguous rows, got \[3, 2\] with strides \[1, 3\]"),
        ([(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))], "a box needs one or two dimensions"),
    ],
    ids=["none", "shape", "dtype", "strides", "dimensions"],
)
def test_boxes_that_cannot_be_described_are_refused(boxes, message):
    with pytest.raises(ValueError, match=message):
        BoxTable.of(boxes)
