"""Views of many boxes against plain indexing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import slices
from megarl.reshard.transfer.box_views import (
    consecutive,
    contiguous_bytes,
    copy_boxes,
    first_element,
    split_regions,
    view_box,
    view_to_send,
    views_like,
)

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
    with pytest.raises(WeightSyncError, match=r"size \[4, 2\] does not contain the box \(\(3, 5\), \(0, 2\)\)"):
        view_box(torch.zeros(4, 2), ((3, 5), (0, 2)), 16)


def test_regions_of_a_larger_buffer_are_named_by_their_offsets():
    data = torch.arange(32, dtype=torch.uint8)
    regions = split_regions(data, (3, 5, 16))
    assert {offset: region.tolist() for offset, region in regions.items()} == {
        0: [*range(3)],
        3: [*range(3, 8)],
        8: [*range(8, 24)],
        24: [*range(24, 32)],
    }
    assert split_regions(data, ())[0].data_ptr() == data.data_ptr()


def test_boxes_of_several_dtypes_are_copied_one_after_another():
    boxes = [torch.randn(2, 3), torch.randn(4), torch.randn(8).bfloat16().view(4, 2)[1:3], torch.randn(3, 4).T[:2]]
    ordered = [boxes[0], boxes[1], boxes[3], boxes[2]]  # larger elements first
    data = torch.zeros(256, dtype=torch.uint8)
    copy_boxes(views_like(data, 16, ordered), ordered)
    expected = b"".join(box.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for box in ordered)
    assert bytes(data.numpy())[16 : 16 + len(expected)] == expected
    assert not data[:16].any()
    copies = [torch.empty_like(box) for box in ordered]
    copy_boxes(copies, views_like(data, 16, copies))
    assert all(torch.equal(copy, box) for copy, box in zip(copies, ordered, strict=True))
    copy_boxes([], [])


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
