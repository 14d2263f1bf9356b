from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megarl.reshard.bucket import ALIGNMENT, SharedBuffer, dtype_name, lay_out, open_bucket, torch_dtype

SHAPES = [
    ("a", torch.float32, (3, 5)),
    ("b", torch.bfloat16, (7,)),
    ("scalar", torch.float32, ()),
    ("c", torch.int64, (2, 2)),
]


def test_slots_are_aligned_and_do_not_overlap() -> None:
    slots, num_bytes = lay_out(SHAPES)
    end = 0
    for slot, (name, dtype, shape) in zip(slots, SHAPES, strict=True):
        assert (slot.name, torch_dtype(slot.dtype), slot.shape) == (name, dtype, shape)
        assert slot.offset % ALIGNMENT == 0
        assert end <= slot.offset < end + ALIGNMENT
        assert slot.num_bytes == torch.empty(shape, dtype=dtype).nbytes
        end = slot.offset + slot.num_bytes
    assert end <= num_bytes < end + ALIGNMENT
    assert lay_out([]) == ((), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_names_of_dtypes_are_reversible(dtype: torch.dtype) -> None:
    assert torch_dtype(dtype_name(dtype)) is dtype


def test_what_the_owner_writes_another_mapping_reads_and_nothing_is_copied() -> None:
    slots, num_bytes = lay_out(SHAPES)
    buffer = SharedBuffer(num_bytes)
    try:
        tensors = open_bucket(buffer.describe(slots))
        assert list(tensors) == [name for name, _, _ in SHAPES]
        for seed, slot in enumerate(slots):
            torch.manual_seed(seed)
            value = (100 * torch.randn(slot.shape)).to(torch_dtype(slot.dtype))
            buffer.view(slot).copy_(value)
            assert torch.equal(tensors[slot.name], value)
    finally:
        buffer.close()


READER = """
import sys
from megarl.reshard.bucket import WeightBucket, TensorSlot, open_bucket
path, size = sys.argv[1], int(sys.argv[2])
bucket = WeightBucket(path, size, (TensorSlot("a", "float32", (4,), 64),))
print(open_bucket(bucket)["a"].tolist())
"""


def test_another_process_reads_it_and_after_closing_none_does() -> None:
    buffer = SharedBuffer(4096)
    slots, _ = lay_out([("first", torch.float32, (1,)), ("a", torch.float32, (4,))])
    buffer.view(slots[1]).copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    command = [sys.executable, "-c", READER, buffer.path, str(buffer.num_bytes)]
    assert subprocess.check_output(command, text=True) == "[1.0, 2.0, 3.0, 4.0]\n"
    buffer.close()
    buffer.close()
    assert not os.path.exists(buffer.path)
    assert subprocess.run(command, capture_output=True).returncode != 0
