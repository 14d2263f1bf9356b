"""Tracing with layer deduplication, on small models where it is or is not exact."""

import torch
from torch import nn

from megarl.reshard.layout.layout import TensorSpec
from megarl.rollout.sglang.weight_layout.engine_trace import trace_live
from megarl.rollout.sglang.weight_layout.layer_dedup import group_identical_layers, trace_deduplicated
from megarl.rollout.sglang.weight_layout.trace_file import read_traces, write_traces


class Layers(nn.Module):
    """Layer i loads `layers.i.weight`; `swapped` and `reversed_layer` make some layers differ."""

    def __init__(self, heights, *, swapped=None, reversed_layer=None):
        super().__init__()
        self.embed = nn.Parameter(torch.empty(4, 3))
        self.layers = nn.ModuleList(nn.Linear(3, height, bias=False) for height in heights)
        self.swapped = swapped or {}
        self.reversed_layer = reversed_layer

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
    return trace_live(model, parts), trace_deduplicated(model, parts, group_identical_layers(model, parts))


def test_identical_layers_get_the_pieces_and_padding_of_the_first():
    model, parts = Layers([5, 6, 6, 5, 6]), tensors([4, 4, 4, 4, 4])
    assert group_identical_layers(model, parts) == {0: [0, 3], 1: [1, 2, 4]}
    full_trace, deduplicated = trace_both_ways(model, parts)
    assert deduplicated == full_trace
    assert len(deduplicated.padding) == 5
    assert {spec.dtype for spec in deduplicated.layout.tensors.values()} == {"float32"}


def test_layers_with_different_tensors_are_in_different_groups():
    assert group_identical_layers(Layers([4, 4, 4]), tensors([4, 2, 4])) == {0: [0, 2], 1: [1]}


def test_layer_with_a_different_loader_makes_the_traces_differ():
    full_trace, deduplicated = trace_both_ways(Layers([4, 4, 4], reversed_layer=2), tensors([4, 4, 4]))
    assert deduplicated is not None
    assert deduplicated != full_trace


def test_layer_loaded_into_another_cannot_be_deduplicated():
    model = Layers([4, 6], swapped={0: 1, 1: 0})
    model.layers[0].weight.data = torch.empty(6, 3)
    assert trace_deduplicated(model, tensors([4, 4]), group_identical_layers(model, tensors([4, 4]))) is None


def test_trace_file_round_trip_and_truncated_file(tmp_path):
    parts = tensors([4, 4])
    traces = [trace_live(Layers([5, 5]), parts), trace_live(Layers([4, 6]), parts)]
    file = tmp_path / "traces"
    write_traces(file, traces)
    assert read_traces(file) == traces
    file.write_bytes(file.read_bytes()[:-40])
    assert read_traces(file) is None
    assert read_traces(tmp_path / "none") is None
