"""Copies boxes of a bucket that another process owns, and prints the checksum of each copy."""

import sys

import torch
from torch import Tensor

from megarl.reshard.transfer.bucket import BoxBucket, map_bucket
from megarl_kernels import BoxTable, copy_boxes

NUM_BOXES = 60


def boxes(memory: Tensor) -> list[Tensor]:
    """Return overlap-free boxes of a matrix of 512 rows, of different shapes."""
    matrix = memory.view(512, -1)
    return [matrix[8 * i : 8 * i + 1 + i % 8, 16 * i : 16 * i + 64 + 8 * i] for i in range(NUM_BOXES)]


def main(path: str, num_bytes: int) -> None:
    """Copy the boxes to memory of this process, check them, and print the checksums, one per line."""
    mapped = map_bucket(BoxBucket(path, num_bytes, ()))
    own = torch.zeros_like(mapped)
    sums = copy_boxes(BoxTable.of(list(zip(boxes(mapped), boxes(own), strict=True))), checksum=True)
    assert sums is not None
    for a, b in zip(boxes(mapped), boxes(own), strict=True):
        assert torch.equal(a, b)
    sys.stdout.write("\n".join(str(value) for value in sums.tolist()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
