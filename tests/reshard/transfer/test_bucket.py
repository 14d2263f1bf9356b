import functools
import inspect
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.multiprocessing.reductions

from megarl.errors import WeightSyncError
from megarl.reshard.transfer import bucket as bucket_module
from megarl.reshard.transfer.bucket import (
    ALIGNMENT,
    IPC_STORAGE,
    BoxBucket,
    DeviceBuffer,
    SharedBuffer,
    WeightBucket,
    identify_memory,
    lay_out,
    make_buffer,
    map_bucket,
    open_bucket,
    torch_dtype,
)
from tests.reshard.rank_process import call_in_process

SHAPES = [
    ("a", torch.float32, (3, 5)),
    ("b", torch.bfloat16, (7,)),
    ("scalar", torch.float32, ()),
    ("c", torch.int64, (2, 2)),
]


def test_slots_are_aligned_and_do_not_overlap():
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


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("make", [SharedBuffer, partial(DeviceBuffer, device=torch.device("cpu"))], ids=["host", "gpu"])
def test_open_bucket_views_memory_without_copies(make):
    slots, num_bytes = lay_out(SHAPES)
    buffer = make(num_bytes)
    tensors = open_bucket(buffer.describe(slots))
    assert list(tensors) == [name for name, _, _ in SHAPES]
    for seed, slot in enumerate(slots):
        torch.manual_seed(seed)
        value = (100 * torch.randn(slot.shape)).to(torch_dtype(slot.dtype))
        buffer.view(slot).copy_(value)
        assert torch.equal(tensors[slot.name], value)
    buffer.close()


def read(bucket: WeightBucket) -> list[float]:
    return open_bucket(bucket)["a"].tolist()


def test_another_process_reads_a_bucket_until_it_is_closed():
    buffer = SharedBuffer(4096)
    slots, _ = lay_out([("first", torch.float32, (1,)), ("a", torch.float32, (4,))])
    buffer.view(slots[1]).copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    bucket = buffer.describe(slots)
    assert call_in_process(read, bucket) == [1.0, 2.0, 3.0, 4.0]
    buffer.close()
    buffer.close()
    assert not os.path.exists(buffer.path)
    with pytest.raises(RuntimeError, match="No such file"):
        open_bucket(bucket)


DEVICE_READER = """
import sys
from megarl.reshard.transfer.bucket import BoxBucket, map_bucket
data = map_bucket(BoxBucket(sys.argv[1], int(sys.argv[2]), ()))
print(data.device.type, data[:4].tolist())
"""


@pytest.mark.gpu
def test_device_memory_is_read_without_a_copy():
    buffer = make_buffer(10, torch.device("cuda"))
    assert isinstance(buffer, DeviceBuffer)
    bucket = BoxBucket(buffer.path, buffer.num_bytes, ())
    buffer.bytes[:4] = torch.tensor([7, 8, 9, 10], device="cuda")
    assert map_bucket(bucket)[:4].tolist() == [7, 8, 9, 10]
    torch.cuda.synchronize()
    command = [sys.executable, "-c", DEVICE_READER, buffer.path, str(buffer.num_bytes)]
    assert subprocess.check_output(command, text=True) == "cuda [7, 8, 9, 10]\n"
    buffer.close()


@pytest.mark.gpu
def test_closing_device_memory_frees_it_also_where_a_view_is_left():
    before = torch.cuda.memory_allocated()
    buffer = DeviceBuffer(2**22, torch.device("cuda"))
    view = buffer.bytes[:8]
    assert torch.cuda.memory_allocated() == before + 2**22
    buffer.close()
    assert torch.cuda.memory_allocated() == before
    del view


UUIDS = ["GPU-a", "GPU-b"]


@pytest.fixture
def fake_cuda(monkeypatch) -> list[str]:
    """Fake torch's IPC handles without a device; return the list of calls that release memory."""
    made: dict[bytes, torch.Tensor] = {}
    calls: list[str] = []

    def reduce_tensor(tensor: torch.Tensor) -> tuple[None, tuple[object, ...]]:
        made[b"\x00handle\xff"] = tensor
        known = (torch.Tensor, tensor.shape, tensor.stride(), 0, torch.UntypedStorage, tensor.dtype)
        return None, (*known, 3, b"\x00handle\xff", tensor.nbytes, 0, False, b"count", 16, b"event", True)

    def rebuild_cuda_tensor(*arguments: object) -> torch.Tensor:
        assert len(arguments) == len(inspect.signature(torch.multiprocessing.reductions.rebuild_cuda_tensor).parameters)
        assert arguments[1:7] == ((4096,), (1,), 0, torch.UntypedStorage, torch.uint8, 1)
        assert arguments[8:] == (4096, 0, False, b"count", 16, b"event", True)
        return made[arguments[7]]

    reductions = torch.multiprocessing.reductions
    real = inspect.signature(reductions.rebuild_cuda_tensor).parameters
    assert list(real)[IPC_STORAGE][:2] == ["storage_device", "storage_handle"]
    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(
        reductions, "rebuild_cuda_tensor", functools.wraps(reductions.rebuild_cuda_tensor)(rebuild_cuda_tensor)
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: calls.append("ipc_collect"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(UUIDS))
    monkeypatch.setattr(bucket_module, "device_uuid", lambda device: UUIDS[device.index or 0])
    return calls


def test_device_memory_is_identified_by_its_handle(fake_cuda, monkeypatch):
    """The reader sees the owner's GPU under another number."""
    buffer = DeviceBuffer(10, torch.device("cpu"))
    bucket = BoxBucket(buffer.path, buffer.num_bytes, ())
    buffer.bytes[:3] = torch.tensor([7, 8, 9])
    assert map_bucket(bucket)[:3].tolist() == [7, 8, 9]
    assert identify_memory(bucket) == ((buffer.path,), 4096)
    assert isinstance(make_buffer(10, torch.device("cpu")), SharedBuffer)
    del buffer  # as in another process
    monkeypatch.setattr(bucket_module, "device_uuid", lambda device: ["GPU-c", "GPU-a"][device.index or 0])
    assert map_bucket(bucket)[:3].tolist() == [7, 8, 9]
    monkeypatch.setattr(bucket_module, "device_uuid", lambda device: ["GPU-c", "GPU-d"][device.index or 0])
    with pytest.raises(WeightSyncError, match=r"the weights are on GPU GPU-a, .* it sees GPU-c, GPU-d"):
        map_bucket(bucket)


def test_closing_device_memory_frees_the_storage_and_collects_what_others_have_released(fake_cuda):
    buffer = DeviceBuffer(10, torch.device("cpu"))
    assert fake_cuda == ["ipc_collect"]  # of the buffers of the last push
    view = buffer.bytes[:4]
    buffer.close()
    assert view.untyped_storage().nbytes() == 0
    assert fake_cuda == ["ipc_collect"] * 2
    buffer.close()
    assert fake_cuda == ["ipc_collect"] * 2
