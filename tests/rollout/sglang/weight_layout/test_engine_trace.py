"""Traces of the kinds of loaders that SGLang's models have, and of some that must be rejected."""

import concurrent.futures

import pytest
import torch
from torch import nn

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import TensorSpec
from megarl.rollout.sglang.weight_layout.engine_trace import Padding, trace_live

TENSORS = {"a": TensorSpec((4, 6), "float32"), "b": TensorSpec((4, 6), "float32")}


class Model(nn.Module):
    def __init__(self, shape, write):
        super().__init__()
        self.w = nn.Parameter(torch.full(shape, -7.0))
        self.register_buffer("twice", torch.zeros(shape))
        self.write = write

    def load_weights(self, weights):
        self.write(self, weights)


def trace_loader(shape, write, tensors=TENSORS):
    model = Model(shape, write)
    trace = trace_live(model, tensors)
    assert (model.w == -7.0).all()
    return trace


def pieces(trace):
    return {(p.tensor, p.box, p.local_box) for p in trace.layout.pieces}


def test_values_are_tracked_through_intermediate_tensors():
    def write(model, weights):
        both = torch.cat([t for _, t in weights], dim=1).to(torch.bfloat16).float()[1:3].clone()
        model.w.data.copy_(both[:, 3:9])

    assert pieces(trace_loader((2, 6), write)) == {
        ("a", ((1, 3), (3, 6)), ((0, 2), (0, 3))),
        ("b", ((1, 3), (0, 3)), ((0, 2), (3, 6))),
    }


def test_copying_a_view_to_itself_changes_nothing():
    def write(model, weights):
        for name, t in weights:
            if name == "a":
                model.w.data.copy_(t)
        model.w.data[1:2].copy_(model.w.data[1:2])

    trace = trace_loader((4, 6), write)
    assert pieces(trace) == {("a", ((0, 4), (0, 6)), ((0, 4), (0, 6)))}
    assert trace.derived == ()


def test_last_write_wins():
    def write(model, weights):
        model.w.data.zero_()
        for name, t in weights:
            model.w.data[:4].copy_(t) if name == "a" else model.w.data[1:2, :2].copy_(t[:1, 4:])

    trace = trace_loader((5, 6), write)
    assert ("b", ((0, 1), (4, 6)), ((1, 2), (0, 2))) in pieces(trace)
    assert sum(p.tensor == "a" for p in trace.layout.pieces) == 3
    assert trace.padding == (Padding("w", ((4, 5), (0, 6)), 0.0),)


def test_stacked_tensors_are_traced_as_rows():
    def write(model, weights):
        for i, (_, t) in enumerate(weights):
            model.w.data[1 - i][2:].copy_(t)
            model.w.data[1 - i][:2].fill_(0)

    assert pieces(trace_loader((2, 6, 6), write)) == {
        ("a", ((0, 4), (0, 6)), ((8, 12), (0, 6))),
        ("b", ((0, 4), (0, 6)), ((2, 6), (0, 6))),
    }


def test_loaders_with_thread_pools_are_traced():
    def write(model, weights):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda t: model.w.data.copy_(t[1]), weights))

    assert pieces(trace_loader((4, 6), write)) == {("b", ((0, 4), (0, 6)), ((0, 4), (0, 6)))}


@pytest.mark.parametrize(
    "compute",
    [
        lambda model, t: (model.w.data.copy_(t), model.twice.copy_(model.w.data * 2)),
        lambda model, t: model.w.data.copy_(t * 2),
        lambda model, t: (model.w.data.copy_(t), model.w.data.add_(1)),
        lambda model, t: model.w.data.copy_(t.view(6, 4).t()),
    ],
    ids=["from a parameter", "from a tensor", "in place", "transposed"],
)
def test_tensors_with_computed_values_are_derived(compute):
    def write(model, weights):
        for name, t in weights:
            if name == "b":
                compute(model, t)

    assert trace_loader((4, 6), write).derived == ("b",)


def test_unwritten_part_is_reported():
    def write(model, weights):
        for _, t in weights:
            model.w.data[:4].copy_(t)

    with pytest.raises(WeightSyncError, match=r"parts of 1 of 1 parameters unwritten: w \[6, 6\] at \[4:6, 0:6\]"):
        trace_loader((6, 6), write)


def test_reallocated_parameter_is_reported_and_keeps_its_memory():
    def write(model, weights):
        for _, t in weights:
            model.w.data.copy_(t)
        model.w.data = torch.zeros(4, 6)

    with pytest.raises(WeightSyncError, match="reallocates 1 parameters: w"):
        trace_loader((4, 6), write)


def test_values_computed_after_the_last_tensor_need_post_load_weights():
    def write(model, weights):
        for _, t in weights:
            model.w.data.copy_(t)
        model.twice.copy_(model.w.data * 2)

    with pytest.raises(WeightSyncError, match="has no post_load_weights"):
        trace_loader((4, 6), write)
    Model.post_load_weights = lambda self: None
    try:
        assert trace_loader((4, 6), write).derived == ()
    finally:
        del Model.post_load_weights
