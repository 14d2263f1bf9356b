"""Views of many boxes at once, in tensors and in buffers, and copies between them.

A view takes a microsecond or two of Python and of torch, and a sync of a large model has 100,000 boxes per rank. So
all messages of a bucket are split off in one call, so are boxes that lie one after another, and all copies of a hop or
of a round are one call:

    bucket        | message, 16 KB | box of a, 1 KB | box of b, 1 KB | message ...        split_regions: one call
    copies                           views_like(bucket, offset, [a, b]), copy_boxes: one call each
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Box, slices

SENT_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes that gloo and NCCL send as they are."""


def split_regions(data: Tensor, sizes: Sequence[int]) -> dict[int, Tensor]:
    """Return, by their offsets, views of consecutive bytes of `data`, which may be larger than all `sizes` together."""
    regions = data.split_with_sizes([*sizes, len(data) - sum(sizes)])
    return dict(zip(accumulate(sizes, initial=0), regions, strict=True))


def views_like(data: Tensor, offset: int, boxes: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the bytes of `data` from `offset` on, one after another with the dtype and shape of each box.

    torch has no public name for the function behind it; its own data parallelism uses this one.
    """
    views: list[Tensor] = []
    for dtype, group in groupby(boxes, key=lambda box: box.dtype):
        same = list(group)
        end = offset + sum([box.nbytes for box in same])
        views += _unflatten_dense_tensors(data[offset:end].view(dtype), same)  # type: ignore[no-untyped-call]
        offset = end
    return views


def copy_boxes(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into the target of the same shape and dtype.

    On GPUs, boxes with one kernel for many, if each has the strides of its target and all have the same dtype (torch's
    `_check_tensors_share_sizes_and_strides`); a single other pair would make it one kernel for each box.
    """
    groups: dict[torch.dtype | None, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        alike = target.dtype if target.stride() == source.stride() else None
        into, out_of = groups.setdefault(alike, ([], []))
        into.append(target)
        out_of.append(source)
    for into, out_of in groups.values():
        torch._foreach_copy_(into, out_of, non_blocking=True)


def view_box(tensor: Tensor, box: Box, num_bytes: int) -> Tensor:
    """Return a view of the elements of the box, of any shape if they are contiguous, else of the box's shape.

    Args:
        num_bytes: size of the box.

    Raises:
        WeightSyncError: the tensor does not contain the box.
    """
    is_contiguous = tensor.is_contiguous()
    if is_contiguous and tensor.nbytes == num_bytes:
        return tensor
    if any(stop > size for (_, stop), size in zip(box, tensor.shape, strict=True)):
        raise WeightSyncError(f"a tensor of size {list(tensor.shape)} does not contain the box {box}")
    first = first_element(box, tensor.shape) if is_contiguous else None
    if first is None:
        return tensor[slices(box)]
    return tensor.view(-1)[first : first + num_bytes // tensor.itemsize]


def view_to_send(tensor: Tensor, box: Box, num_bytes: int) -> Tensor | None:
    """Return a contiguous view of the elements of the box, of any shape, or None if they are not contiguous.

    Its dtype is the tensor's own where gloo and NCCL can send it, which saves a view per message, else uint8. Both
    ends of a message have checked that their dtypes are equal. Arguments and errors as for `view_box`.
    """
    view = view_box(tensor, box, num_bytes)
    if view.dtype in SENT_DTYPES and view.is_contiguous():
        return view
    return contiguous_bytes(view)


def first_element(box: Box, shape: Sequence[int]) -> int | None:
    """Return the index of the box's first element in a row-major tensor, None if its elements are not contiguous."""
    first, stride, covers_all = 0, 1, True
    for (start, stop), size in zip(box[::-1], shape[::-1], strict=True):
        if not covers_all and stop - start != 1:
            return None
        first += start * stride
        stride *= size
        covers_all = covers_all and stop - start == size
    return first


def contiguous_bytes(box: Tensor) -> Tensor | None:
    """Return a uint8 view of the box, of any shape, or None if it is not contiguous."""
    if not box.is_contiguous():
        return None
    if not box.ndim or box.stride(-1) != 1:  # a contiguous dimension of size 1 may have any stride
        box = box.as_strided((box.numel(),), (1,))
    return box.view(torch.uint8)


def consecutive(offsets: Iterable[int], sizes: Sequence[int]) -> list[slice]:
    """Return the slices of regions that lie one after another."""
    found, begin, end = [], 0, None
    for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if end is not None and offset != end:
            found.append(slice(begin, number))
            begin = number
        end = offset + size
    return [*found, slice(begin, len(sizes))] if sizes else []


def stack_boxes(boxes: Sequence[Box]) -> Box | None:
    """Return the union of boxes that are adjacent along the first dimension, or None if they are not."""
    for box, following in pairwise(boxes):
        if box[1:] != following[1:] or box[0][1] != following[0][0]:
            return None
    return ((boxes[0][0][0], boxes[-1][0][1]), *boxes[0][1:])
