"""Buckets, and views of boxes in them."""

import functools
import inspect
import mmap
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.multiprocessing.reductions
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import slices
from megarl.reshard.transfer import bucket as bucket_module
from megarl.reshard.transfer.bucket import (
    ALIGNMENT,
    IPC_COUNTER,
    IPC_STORAGE,
    Bucket,
    DeviceBuffer,
    MappedBuckets,
    PrivateBuffer,
    SharedBuffer,
    SyncMemory,
    consecutive,
    contiguous_bytes,
    copy_boxes,
    first_element,
    lay_out,
    make_buffer,
    map_bucket,
    open_bucket,
    slot_view,
    split_regions,
    torch_dtype,
    view_box,
    view_to_send,
    views_like,
)
from tests.errors import expect_error
from tests.reshard.rank_process import call_in_process, kept_buffers

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
    tensors = open_bucket(Bucket(buffer.path, buffer.num_bytes, tuple(slots)))
    assert list(tensors) == [name for name, _, _ in SHAPES]
    for seed, slot in enumerate(slots):
        torch.manual_seed(seed)
        value = (100 * torch.randn(slot.shape)).to(torch_dtype(slot.dtype))
        slot_view(buffer.bytes, slot).copy_(value)
        assert torch.equal(tensors[slot.name], value)
    buffer.close()


def read(bucket):
    return open_bucket(bucket)["a"].tolist()


def test_another_process_reads_a_bucket_until_it_is_closed():
    buffer = SharedBuffer(4096)
    slots, _ = lay_out([("first", torch.float32, (1,)), ("a", torch.float32, (4,))])
    slot_view(buffer.bytes, slots[1]).copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    bucket = Bucket(buffer.path, buffer.num_bytes, tuple(slots))
    assert call_in_process(read, bucket) == [1.0, 2.0, 3.0, 4.0]
    buffer.close()
    buffer.close()
    assert not os.path.exists(buffer.path)
    with expect_error(FileNotFoundError, bucket.path):
        open_bucket(bucket)


DEVICE_READER = """
import sys
from megarl.reshard.transfer.bucket import Bucket, map_bucket
data = map_bucket(Bucket(sys.argv[1], int(sys.argv[2])))
print(data.device.type, data[:4].tolist())
"""


@pytest.mark.gpu
def test_device_memory_is_read_without_a_copy():
    buffer = make_buffer(10, torch.device("cuda"))
    assert isinstance(buffer, DeviceBuffer)
    bucket = Bucket(buffer.path, buffer.num_bytes)
    buffer.bytes[:4] = torch.tensor([7, 8, 9, 10], device="cuda")
    assert map_bucket(bucket)[:4].tolist() == [7, 8, 9, 10]
    torch.cuda.synchronize()
    command = [sys.executable, "-c", DEVICE_READER, buffer.path, str(buffer.num_bytes)]
    assert subprocess.check_output(command, text=True) == "cuda [7, 8, 9, 10]\n"
    buffer.close()


READERS = """
import sys, torch
from megarl.reshard.transfer.bucket import Bucket, map_bucket
for _ in range(2):
    data = map_bucket(Bucket(sys.argv[1], int(sys.argv[2])))
    assert data.sum() == 1
    del data
print("dropped", flush=True)
input()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("num_readers", [0, 1, 2])
@pytest.mark.parametrize("times_here", [0, 1, 2])
def test_closing_device_memory_frees_it_whoever_has_mapped_it(num_readers, times_here):
    """Also where a view is left. Each reader maps and drops it twice, and runs on."""
    DeviceBuffer(1, torch.device("cuda")).close()  # allocates what all buffers share
    before = torch.cuda.memory_allocated()
    buffer = DeviceBuffer(2**22, torch.device("cuda"))
    buffer.bytes.zero_()[5] = 1
    torch.cuda.synchronize()
    view = buffer.bytes[:8]
    assert torch.cuda.memory_allocated() == before + 2**22
    for _ in range(times_here):
        assert map_bucket(Bucket(buffer.path, buffer.num_bytes)).is_cuda
    with ExitStack() as stack:
        for _ in range(num_readers):
            command = [sys.executable, "-c", READERS, buffer.path, str(buffer.num_bytes)]
            reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(reader)
            stack.callback(reader.communicate, "\n")
            assert reader.stdout.readline() == "dropped\n"
        buffer.close()
        assert torch.cuda.memory_allocated() == before
    del view


UUIDS = ["GPU-a", "GPU-b"]


@pytest.fixture
def fake_cuda(monkeypatch):
    """Fake torch's IPC handles without a device; return the counts of readers of what has been exported, by index."""
    made, counts = {}, {}

    def reduce_tensor(tensor):
        handle, offset = b"\x00handle\xff%d" % len(made), len(made)
        made[handle], counts[offset] = tensor, 1
        known = (torch.Tensor, tensor.shape, tensor.stride(), 0, torch.UntypedStorage, tensor.dtype)
        return None, (*known, 3, handle, tensor.nbytes, 0, False, b"count", offset, b"event", True)

    def rebuild_cuda_tensor(*arguments):
        assert len(arguments) == len(inspect.signature(torch.multiprocessing.reductions.rebuild_cuda_tensor).parameters)
        assert arguments[1:7] == ((4096,), (1,), 0, torch.UntypedStorage, torch.uint8, 1)
        assert (arguments[8:12], arguments[13:]) == ((4096, 0, False, b"count"), (b"event", True))
        counts[arguments[12]] -= 1  # once it is dropped
        return made[arguments[7]]

    def release_counter(handle, offset, device):
        assert handle == b"count"
        counts[offset] -= 1

    reductions = torch.multiprocessing.reductions
    real = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)[IPC_STORAGE]
    assert real[:2] == ["storage_device", "storage_handle"]
    assert real[IPC_COUNTER] == ["ref_counter_handle", "ref_counter_offset"]
    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    fake = functools.wraps(reductions.rebuild_cuda_tensor)(rebuild_cuda_tensor)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", fake)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", release_counter)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(UUIDS))
    monkeypatch.setattr(bucket_module, "device_uuid", lambda device: UUIDS[device.index or 0])
    bucket_module.reader_counter.cache_clear()
    yield counts
    bucket_module.reader_counter.cache_clear()


def test_each_bucket_is_mapped_once_and_never_beyond_its_memory():
    mapped, buffers = MappedBuckets(), [SharedBuffer(mmap.PAGESIZE) for _ in range(2)]
    buckets = [Bucket(buffer.path, buffer.num_bytes) for buffer in buffers]
    for bucket, buffer in zip(buckets, buffers, strict=True):
        data = mapped.map(bucket)
        assert mapped.map(replace(bucket)) is data
        buffer.bytes[0] = 7
        assert data[0] == 7
    buffers[0].close()
    buffers.append(SharedBuffer(mmap.PAGESIZE))
    assert buffers[-1].path == buffers[0].path  # of other memory
    assert mapped.map(buckets[0])[0] == 0
    with expect_error(WeightSyncError, buffers[1].path, str(2 * mmap.PAGESIZE), f"got {mmap.PAGESIZE}"):
        mapped.map(replace(buckets[1], num_bytes=2 * mmap.PAGESIZE))


def read_as_another_process(patch):
    """Map buffers of this process as another one would, which sees the owner's GPU under another number."""
    patch.setattr(bucket_module, "_OWN", {})
    patch.setattr(bucket_module, "device_uuid", lambda device: ["GPU-c", "GPU-a"][device.index or 0])


def test_buckets_are_unmapped_after_a_sync_without_them(fake_cuda, monkeypatch):
    """GPU memory always: its owner frees it with the sync."""
    host = [SharedBuffer(mmap.PAGESIZE) for _ in range(3)]
    device, private = DeviceBuffer(10, torch.device("cpu")), PrivateBuffer(10, torch.device("cpu"))
    first, second, third, on_device, in_process = (
        Bucket(buffer.path, buffer.num_bytes) for buffer in (*host, device, private)
    )
    mapped = MappedBuckets()
    assert mapped.map(in_process) is private.bytes
    read_as_another_process(monkeypatch)
    kept = mapped.map(first)
    for bucket in (second, on_device, first):
        mapped.map(bucket)
    mapped.end_sync()
    assert len(mapped) == 2  # those in host memory
    assert mapped.map(first) is kept
    mapped.map(third)
    assert len(mapped) == 3
    mapped.end_sync()
    assert len(mapped) == 2
    assert mapped.map(first) is kept
    mapped.end_sync()
    mapped.end_sync()
    assert len(mapped) == 0


CPU = torch.device("cpu")


def take(memory, num_bytes, make=make_buffer, device=CPU):
    """Return the two buffers of a sync."""
    with memory.lent():
        return list(memory.take("buckets", make, 2, num_bytes, device))


def open_files():
    """Return the shared buffers that this process has open."""
    return {name for name in kept_buffers() if str(name).startswith("open")}


def test_buffers_in_host_memory_are_kept_while_they_are_large_enough():
    memory, before = SyncMemory(), open_files()
    first = take(memory, 2 * mmap.PAGESIZE)
    files = open_files() - before
    assert len(files) == 2
    for num_bytes in (2 * mmap.PAGESIZE, 10):
        assert take(memory, num_bytes) == first  # the same objects
    assert take(memory, 10, PrivateBuffer) == first
    larger = take(memory, 3 * mmap.PAGESIZE)
    assert not set(larger) & set(first)
    assert len(open_files() - before) == 2
    assert not files & open_files()
    memory.close()
    assert open_files() == before
    private = take(memory, 10, PrivateBuffer)
    assert take(memory, 10, PrivateBuffer) == private
    assert not set(take(memory, 10)) & set(private)  # another process reads these
    memory.close()


def test_smaller_buffers_are_freed_before_larger_ones_are_allocated():
    memory, before, num_open = SyncMemory(), open_files(), []

    def make(num_bytes, _):
        num_open.append(len(open_files() - before))
        return SharedBuffer(num_bytes)

    for num_bytes in (10, 2 * mmap.PAGESIZE):
        take(memory, num_bytes, make)
    assert num_open == [0, 1, 0, 1]
    memory.close()


def test_buffers_on_other_devices_are_freed_with_each_sync():
    memory, meta, closed = SyncMemory(), torch.device("meta"), []

    class Buffer(PrivateBuffer):
        def close(self):
            closed.append(self)

    for _ in range(2):
        buffers = take(memory, 10, Buffer, meta)
        assert closed == buffers[::-1]
        closed.clear()


def test_all_buffers_are_freed_after_a_failed_sync():
    memory, before, taken = SyncMemory(), open_files(), []
    first = take(memory, 10)

    def fail():
        with memory.lent():
            taken.append(memory.take("buckets", make_buffer, 2, 10, CPU))
            assert taken == [first]
            raise WeightSyncError("a rank is lost")

    with pytest.raises(WeightSyncError):
        fail()
    assert taken == [[]]
    assert open_files() == before


def test_buffers_are_freed_if_one_of_them_cannot_be_allocated():
    memory, made = SyncMemory(), []

    def make(num_bytes, _):
        if made:
            raise OSError("no memory is left")
        made.append(SharedBuffer(num_bytes))
        return made[0]

    with pytest.raises(OSError, match="no memory"), memory.lent():
        memory.take("buckets", make, 2, 10, CPU)
    assert not os.path.exists(made[0].path)


def test_device_memory_is_identified_by_its_handle(fake_cuda, monkeypatch):
    """The reader sees the owner's GPU under another number."""
    buffer = DeviceBuffer(10, torch.device("cpu"))
    bucket = Bucket(buffer.path, buffer.num_bytes)
    buffer.bytes[:3] = torch.tensor([7, 8, 9])
    assert map_bucket(bucket)[:3].tolist() == [7, 8, 9]
    assert len(buffer.bytes) == 4096
    assert isinstance(make_buffer(10, torch.device("cpu")), SharedBuffer)
    del buffer  # as in another process
    monkeypatch.setattr(bucket_module, "device_uuid", lambda device: ["GPU-c", "GPU-a"][device.index or 0])
    assert map_bucket(bucket)[:3].tolist() == [7, 8, 9]
    monkeypatch.setattr(bucket_module, "device_uuid", lambda device: ["GPU-c", "GPU-d"][device.index or 0])
    with expect_error(WeightSyncError, "GPU GPU-a", "GPU-c", "GPU-d"):
        map_bucket(bucket)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("settings", "within"),
    [
        ("expandable_segments:True,max_split_size_mb:64", "expandable_segments:False"),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
        ("", ""),
    ],
)
def test_device_memory_is_not_in_expandable_segments(settings, within, variable, fake_cuda, monkeypatch):
    """Other processes may not be allowed to map those; all other memory stays in them."""
    get, set_ = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings
    before, seen, empty = get(), [], torch.empty
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, settings)
    try:
        set_(settings)
        monkeypatch.setattr(torch, "empty", lambda *a, **k: (seen.append(get()), empty(*a, **k))[1])
        DeviceBuffer(10, torch.device("cpu"))
        assert seen[0] == within
        assert get() == settings
    finally:
        set_(before)


@pytest.mark.parametrize("num_readers", [0, 1, 2, 7])
def test_torch_waits_for_no_reader_of_closed_device_memory(num_readers, fake_cuda, monkeypatch):
    """It frees a storage only while the count of its readers is 0."""
    buffer = DeviceBuffer(10, torch.device("cpu"))
    view, bucket = buffer.bytes[:4], Bucket(buffer.path, buffer.num_bytes)
    other = DeviceBuffer(10, torch.device("cpu"))
    with monkeypatch.context() as in_another_process:
        read_as_another_process(in_another_process)
        for _ in range(num_readers):
            map_bucket(bucket)
    for _ in range(2):
        buffer.close()
        assert view.untyped_storage().nbytes() == 0
    token = 1  # the second to be exported
    assert fake_cuda == {0: 0, token: 1 - num_readers, 2: 0}
    assert other.path != bucket.path


DIMENSIONS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=4)


@given(DIMENSIONS, st.booleans(), st.sampled_from([torch.int32, torch.float32]))
@settings(max_examples=300)
def test_a_view_has_the_elements_of_the_box(dims, transposed, dtype):
    shape = [before + length + after for before, length, after in dims]
    box = tuple((before, before + length) for before, length, _ in dims)
    tensor = torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)
    if transposed:
        tensor = tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor
    expected = tensor[slices(box)]
    view = view_box(tensor, box, expected.nbytes)
    assert view.reshape(-1).tolist() == expected.reshape(-1).tolist()
    assert view.is_contiguous() == expected.is_contiguous()
    if tensor.is_contiguous():
        first = first_element(box, shape)
        assert (first is not None) == expected.is_contiguous()
        assert first is None or first == expected.reshape(-1)[0]
    view.zero_()
    assert not expected.any()  # the same memory
    for data, sent_as in (
        (contiguous_bytes(view), torch.uint8),
        (view_to_send(tensor, box, expected.nbytes), torch.float32 if dtype == torch.float32 else torch.uint8),
    ):
        assert (data is None) != view.is_contiguous()
        assert data is None or (data.dtype, data.nbytes) == (sent_as, expected.nbytes)
        assert data is None or data.data_ptr() == expected.data_ptr()


def test_a_box_outside_of_the_tensor_is_refused():
    with expect_error(WeightSyncError, "[4", "2]", "((3", "5)", "(0", "2))"):
        view_box(torch.zeros(4, 2), ((3, 5), (0, 2)), 16)


def test_regions_of_a_larger_buffer_are_named_by_their_offsets():
    data = torch.arange(32, dtype=torch.uint8)
    found = {offset: region.tolist() for offset, region in split_regions(data, (3, 5, 16)).items()}
    assert found == {0: [*range(3)], 3: [*range(3, 8)], 8: [*range(8, 24)], 24: [*range(24, 32)]}
    assert split_regions(data, ())[0].data_ptr() == data.data_ptr()


def test_boxes_of_several_dtypes_are_copied_one_after_another():
    boxes = [torch.randn(2, 3), torch.randn(4), torch.randn(3, 4).T[:2], torch.randn(8).bfloat16().view(4, 2)[1:3]]
    data = torch.zeros(256, dtype=torch.uint8)
    copy_boxes(views_like(data, 16, boxes), boxes)
    expected = b"".join(box.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for box in boxes)
    assert bytes(data.numpy())[: 16 + len(expected)] == bytes(16) + expected
    copies = [torch.empty_like(box) for box in boxes]
    copy_boxes(copies, views_like(data, 16, copies))
    assert all(torch.equal(copy, box) for copy, box in zip(copies, boxes, strict=True))
    copy_boxes([], [])


def test_boxes_that_one_kernel_can_copy_are_not_slowed_by_others(monkeypatch):
    """On CUDA, `_foreach_copy_` copies a list at once if all pairs have equal strides, and all boxes one dtype."""
    calls, copy = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *lists, **_: calls.append(lists) or copy(*lists))
    plain, rows = [torch.zeros(4, 6), torch.zeros(8)], [torch.zeros(4, 8)[:, 2:5], torch.zeros(3, 4).T]
    targets = [plain[0], rows[0], torch.zeros(3, 2).bfloat16(), plain[1], rows[1]]
    sources = [torch.randn(target.shape).to(target.dtype) for target in targets]
    copy_boxes(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    at_once = [
        into
        for into, out_of in calls
        if all(t.stride() == s.stride() for t, s in zip(into, out_of, strict=True))
        and len({t.dtype for t in into}) == 1
    ]
    assert sorted(len(into) for into in at_once) == [1, 2]
    assert all(any(t is one for one in at_once[0] + at_once[1]) for t in plain)


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([], []),
        ([5], [slice(0, 1)]),
        ([0, 10, 20], [slice(0, 3)]),
        ([0, 16, 26, 10], [slice(0, 1), slice(1, 3), slice(3, 4)]),
    ],
)
def test_regions_that_follow_each_other_are_found(offsets, expected):
    assert consecutive(offsets, [10] * len(offsets)) == expected
