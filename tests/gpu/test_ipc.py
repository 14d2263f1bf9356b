"""Device memory that two processes share: boxes of the owner's bucket are copied by another process."""

import subprocess
import sys

import pytest
import torch

from megarl.reshard.transfer.bucket import make_buffer
from megarl_kernels import BoxTable, copy_boxes
from tests.reshard.transfer.boxes_reader import NUM_BOXES, boxes

MODULE = "tests.reshard.transfer.boxes_reader"


@pytest.mark.gpu
def test_boxes_of_another_process_are_copied_with_their_checksums():
    buffer = make_buffer(2**20, torch.device("cuda"))
    buffer.bytes.copy_(torch.arange(2**20, device="cuda").remainder(251))
    torch.cuda.synchronize()
    own = torch.zeros_like(buffer.bytes)
    table = BoxTable.of(list(zip(boxes(buffer.bytes), boxes(own), strict=True)))
    want = copy_boxes(table, checksum=True).tolist()
    out = subprocess.check_output([sys.executable, "-m", MODULE, buffer.path, str(buffer.num_bytes)], text=True)
    assert [int(line) for line in out.split()] == want
    assert len(set(want)) == NUM_BOXES
    buffer.close()


def test_reader_copies_what_the_owner_describes(capsys):
    """The same code on host memory."""
    from tests.reshard.transfer import boxes_reader

    buffer = make_buffer(2**20, torch.device("cpu"))
    buffer.bytes.copy_(torch.arange(2**20).remainder(251))
    boxes_reader.main(buffer.path, buffer.num_bytes)
    assert len({int(line) for line in capsys.readouterr().out.split()}) == NUM_BOXES
    buffer.close()
