from __future__ import annotations

import numpy as np
import pytest

from megarl.errors import WeightSyncError
from megarl.reshard.bucket import lay_out, torch_dtype
from megarl.reshard.layout import Piece, TensorSpec, WeightLayout, slices
from megarl.reshard.strategies.gather_hf import plan_buckets

TENSORS = {
    "rows": TensorSpec((8, 6), "float32"),
    "columns": TensorSpec((4, 12), "float32"),
    "norm": TensorSpec((33,), "float32"),
    "large": TensorSpec((100, 20), "float32"),
    "last": TensorSpec((5, 3), "float32"),
}


def split(rank: int, size: int, *, without: str = "") -> WeightLayout:
    """Rows, or columns for one tensor, over `size` ranks; the vector whole on each."""
    pieces = []
    for name, spec in TENSORS.items():
        if name == without:
            continue
        box = list(spec.box)
        if name not in ("norm", "last"):
            dim = 1 if name == "columns" else 0
            part = spec.shape[dim] // size
            box[dim] = (rank * part, (rank + 1) * part)
        local = tuple((0, stop - start) for start, stop in box)
        pieces.append(Piece(name, tuple(box), name, local))
    return WeightLayout(TENSORS, tuple(pieces))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1000, 10**9])
def test_every_element_is_sent_once_in_buckets_within_the_bound(size: int, bucket_bytes: int) -> None:
    plans = plan_buckets([split(rank, size) for rank in range(size)], bucket_bytes)
    assert [slot.name for plan in plans for slot in plan.slots] == list(TENSORS)
    sent = {name: np.zeros(spec.shape, int) for name, spec in TENSORS.items()}
    for plan in plans:
        assert plan.num_bytes <= bucket_bytes or len(plan.slots) == 1
        assert plan.num_bytes == lay_out((s.name, torch_dtype(s.dtype), s.shape) for s in plan.slots)[1]
        assert len(plan.pieces) == size
        names = {slot.name for slot in plan.slots}
        for piece in (p for rank in plan.pieces for p in rank):
            assert piece.tensor in names
            sent[piece.tensor][slices(piece.box)] += 1
    assert all((count == 1).all() for count in sent.values())


def test_buckets_are_filled() -> None:
    layout = split(0, 1)
    sizes = [lay_out([(n, torch_dtype(s.dtype), s.shape)])[1] for n, s in TENSORS.items()]
    assert len(plan_buckets([layout], sum(sizes))) == 1
    assert len(plan_buckets([layout], sum(sizes) - 1)) == 2
    assert len(plan_buckets([layout], 1)) == len(TENSORS)


def test_what_several_ranks_hold_is_sent_by_the_lowest() -> None:
    (plan,) = plan_buckets([split(rank, 2) for rank in (0, 1)], 10**9)
    assert [p.tensor for p in plan.pieces[1]] == ["rows", "columns", "large"]


def test_data_parallel_copies_send_nothing() -> None:
    (plan,) = plan_buckets([split(0, 1)] * 3, 10**9)
    assert [len(rank) for rank in plan.pieces] == [len(TENSORS), 0, 0]


def test_a_tensor_that_the_ranks_do_not_hold_whole_is_named() -> None:
    with pytest.raises(WeightSyncError, match=r"^rows: the trainer ranks hold 24 of 48 elements$"):
        plan_buckets([split(0, 2)], 10**9)
    with pytest.raises(WeightSyncError, match=r"^norm: the trainer ranks hold 0 of 33 elements$"):
        plan_buckets([split(0, 1, without="norm")], 10**9)


def test_boxes_that_overlap_in_part_are_a_mistake() -> None:
    spec = {"w": TensorSpec((4,), "float32")}
    layouts = [WeightLayout(spec, (Piece("w", (box,), "w", ((0, 3),)),)) for box in ((0, 3), (1, 4))]
    with pytest.raises(AssertionError, match="overlap in part"):
        plan_buckets(layouts, 10**9)
