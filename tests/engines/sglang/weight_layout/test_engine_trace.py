"""Traces of the kinds of loaders that SGLang's models have, their deduplication by layers, and coverage by boxes."""

import concurrent.futures
import random
import threading
import zlib

import pytest
import torch
from torch import nn

from megarl.engines.sglang.weight_layout.engine_trace import (
    Padding,
    encode_traces,
    find_identical_layers,
    read_traces,
    trace_deduplicated,
    trace_live,
)
from megarl.engines.sglang.weight_layout.load_recorder import Coverage, subtract
from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import TensorSpec, slices, volume
from tests.errors import expect_error

TENSORS = {"a": TensorSpec((4, 6), "float32"), "b": TensorSpec((4, 6), "float32")}


class Model(nn.Module):
    def __init__(self, shape, write):
        super().__init__()
        self.w = nn.Parameter(torch.full(shape, -7.0))
        self.register_buffer("twice", torch.zeros(shape))
        self.write = write

    def load_weights(self, weights):
        self.write(self, weights)


def trace_loader(shape, write):
    model = Model(shape, write)
    trace = trace_live(model, TENSORS)
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


def test_writes_belong_to_the_parameter_if_a_buffer_is_a_view_of_it():
    def write(model, weights):
        for name, t in weights:
            if name == "a":
                model.w.data.copy_(t)

    model = Model((4, 6), write)
    model.twice = model.w.data[:2]
    assert pieces(trace_live(model, TENSORS)) == {("a", ((0, 4), (0, 6)), ((0, 4), (0, 6)))}


def test_last_write_wins():
    def write(model, weights):
        model.w.data.zero_()
        for name, t in weights:
            model.w.data[:4].copy_(t) if name == "a" else model.w.data[1:2, :2].copy_(t[:1, 4:])

    trace = trace_loader((5, 6), write)
    assert ("b", ((0, 1), (4, 6)), ((1, 2), (0, 2))) in pieces(trace)
    assert sum(p.tensor == "a" for p in trace.layout.pieces) == 3
    assert trace.padding == (Padding("w", ((4, 5), (0, 6)), 0.0),)


def test_a_computed_value_that_is_overwritten_is_not_derived():
    def write(model, weights):
        for _, t in weights:
            model.w.data.fill_(t[0, 0])
            model.w.data.copy_(t)

    assert trace_loader((4, 6), write).derived == ()


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


def test_thread_pools_of_other_threads_are_left_alone():
    threads = []

    def use_a_pool():
        with concurrent.futures.ThreadPoolExecutor() as pool:
            threads.extend([threading.get_ident(), pool.submit(threading.get_ident).result()])

    def write(model, weights):
        copy_all(model, weights)
        other = threading.Thread(target=use_a_pool)
        other.start()
        other.join()

    trace_loader((4, 6), write)
    assert len(set(threads)) == 2


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


def copy_all(model, weights, rows=slice(None)):
    for _, t in weights:
        model.w.data[rows].copy_(t)


def test_unwritten_part_is_reported():
    with expect_error(WeightSyncError, "1", "[6", "6]", "[4:6", "0:6]"):
        trace_loader((6, 6), lambda model, weights: copy_all(model, weights, slice(4)))


def test_reallocated_parameter_is_reported_and_keeps_its_memory():
    def write(model, weights):
        copy_all(model, weights)
        model.w.data = torch.zeros(4, 6)

    with expect_error(WeightSyncError, "1", "reallocates", "parameters"):
        trace_loader((4, 6), write)


def test_values_computed_after_the_last_tensor_need_post_load_weights(monkeypatch):
    def write(model, weights):
        copy_all(model, weights)
        model.twice.copy_(model.w.data * 2)

    with expect_error(WeightSyncError, "post_load_weights"):
        trace_loader((4, 6), write)
    monkeypatch.setattr(Model, "post_load_weights", lambda self: None, raising=False)
    assert trace_loader((4, 6), write).derived == ()


class Layers(nn.Module):
    """Layer i loads `layers.i.weight`; `swapped` and `reversed_layer` make some layers differ."""

    def __init__(self, heights, *, swapped=None, reversed_layer=None):
        super().__init__()
        self.embed = nn.Parameter(torch.empty(4, 3))
        self.layers = nn.ModuleList(nn.Linear(3, height, bias=False) for height in heights)
        self.swapped, self.reversed_layer = swapped or {}, reversed_layer

    def load_weights(self, weights):
        for name, t in weights:
            if name == "embed":
                self.embed.data.copy_(t)
                continue
            layer = int(name.split(".")[1])
            w = self.layers[self.swapped.get(layer, layer)].weight.data
            if layer == self.reversed_layer:
                t = torch.cat([t[2:], t[:2]])
            w[: len(t)].copy_(t)
            w[len(t) :].zero_()


def tensors(heights):
    return {"embed": TensorSpec((4, 3), "float32")} | {
        f"layers.{i}.weight": TensorSpec((height, 3), "bfloat16") for i, height in enumerate(heights)
    }


def trace_both_ways(model, parts):
    return trace_live(model, parts), trace_deduplicated(model, parts)


def test_identical_layers_get_the_pieces_and_padding_of_the_first():
    model, parts = Layers([5, 6, 6, 5, 6]), tensors([4, 4, 4, 4, 4])
    assert find_identical_layers(model, parts) == {0: 0, 1: 1, 2: 1, 3: 0, 4: 1}
    full_trace, deduplicated = trace_both_ways(model, parts)
    assert deduplicated == full_trace
    assert len(deduplicated.padding) == 5
    assert {spec.dtype for spec in deduplicated.layout.tensors.values()} == {"float32"}


def test_layers_with_different_tensors_are_not_identical():
    assert find_identical_layers(Layers([4, 4, 4]), tensors([4, 2, 4])) == {0: 0, 1: 1, 2: 0}


def test_layer_with_a_different_loader_makes_the_traces_differ():
    full_trace, deduplicated = trace_both_ways(Layers([4, 4, 4], reversed_layer=2), tensors([4, 4, 4]))
    assert deduplicated is not None
    assert deduplicated != full_trace


def test_layer_loaded_into_another_cannot_be_deduplicated():
    model = Layers([4, 6], swapped={0: 1, 1: 0})
    model.layers[0].weight.data = torch.empty(6, 3)
    assert trace_deduplicated(model, tensors([4, 4])) is None


def test_trace_file_round_trip_and_invalid_files(tmp_path):
    parts = tensors([4, 4])
    traces = [trace_live(Layers([5, 5]), parts), trace_live(Layers([4, 6]), parts)]
    file = tmp_path / "traces"
    file.write_bytes(encode_traces(traces))
    assert read_traces(file) == traces
    for content in (file.read_bytes()[:-40], zlib.compress(b"{}"), zlib.compress(b"{")):
        file.write_bytes(content)
        assert read_traces(file) is None
    assert read_traces(tmp_path / "none") is None


def random_box(rng, shape):
    return tuple(tuple(sorted(rng.sample(range(n + 1), 2))) for n in shape)


def test_coverage_matches_a_mask():
    rng = random.Random(0)
    for shape in [(9,), (6, 5), (4, 3, 5)] * 40:
        coverage, mask = Coverage(), torch.zeros(shape, dtype=torch.bool)
        for _ in range(12):
            box = random_box(rng, shape)
            meeting = coverage.overlapping(box)
            assert bool(meeting) == bool(mask[slices(box)].any())
            if meeting and rng.random() < 0.5:
                coverage.remove(meeting[0])
                mask[slices(meeting[0])] = False
            elif not meeting:
                coverage.add(box)
                mask[slices(box)] = True
            query = random_box(rng, shape)
            hole = coverage.first_gap(query)
            assert (hole is None) == bool(mask[slices(query)].all())
            if hole is not None:
                assert not mask[slices(hole)].any()
            everything = coverage.overlapping(tuple((0, n) for n in shape))
            assert sum(volume(each) for each in everything) == mask.sum()


def test_subtract_returns_disjoint_boxes():
    rng = random.Random(1)
    for _ in range(100):
        box, others = random_box(rng, (6, 5)), [random_box(rng, (6, 5)) for _ in range(3)]
        count = torch.zeros(6, 5)
        for part in subtract(box, others):
            count[slices(part)] += 1
        expected = torch.zeros(6, 5)
        expected[slices(box)] = 1
        for other in others:
            expected[slices(other)] = 0
        assert torch.equal(count, expected)


def test_scalar_has_one_box():
    coverage = Coverage()
    assert coverage.first_gap(()) == ()
    coverage.add(())
    assert coverage.first_gap(()) is None
