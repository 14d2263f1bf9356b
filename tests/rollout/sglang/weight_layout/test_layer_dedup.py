"""Tracing one layer of each kind, on models small enough to see why it does or does not do."""

import torch
from torch import nn

from megarl.reshard.layout.layout import TensorSpec
from megarl.rollout.sglang.weight_layout.engine_trace import trace_live
from megarl.rollout.sglang.weight_layout.layer_dedup import layers_alike, trace_one_of_each
from megarl.rollout.sglang.weight_layout.trace_child import packed
from megarl.rollout.sglang.weight_layout.trace_file import read_traces, write_traces


class Layers(nn.Module):
    """Layer i loads `layers.i.w`, in a manner of its own where it is told so."""

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


def both(model, parts):
    return packed(trace_live(model, parts)), trace_one_of_each(model, parts, layers_alike(model, parts))


def test_layers_of_a_kind_get_the_pieces_and_the_padding_of_the_first():
    model, parts = Layers([5, 6, 6, 5, 6]), tensors([4, 4, 4, 4, 4])
    assert layers_alike(model, parts) == {0: [0, 3], 1: [1, 2, 4]}
    whole, spread = both(model, parts)
    assert spread == whole
    assert len(spread.padding) == 5
    assert {spec.dtype for spec in spread.layout.tensors.values()} == {"float32"}


def test_other_tensors_make_another_kind():
    assert layers_alike(Layers([4, 4, 4]), tensors([4, 2, 4])) == {0: [0, 2], 1: [1]}


def test_a_loader_that_treats_a_layer_its_own_way_shows():
    whole, spread = both(Layers([4, 4, 4], reversed_layer=2), tensors([4, 4, 4]))
    assert spread is not None
    assert spread != whole


def test_a_layer_that_goes_to_another_cannot_be_spread():
    model = Layers([4, 6], swapped={0: 1, 1: 0})
    model.layers[0].weight.data = torch.empty(6, 3)
    assert trace_one_of_each(model, tensors([4, 4]), layers_alike(model, tensors([4, 4]))) is None


def test_traces_come_back_from_their_file_and_a_torn_one_is_none(tmp_path):
    parts = tensors([4, 4])
    traces = [trace_live(Layers([5, 5]), parts), packed(trace_live(Layers([4, 6]), parts))]
    file = tmp_path / "traces"
    write_traces(file, traces)
    assert read_traces(file) == traces
    file.write_bytes(file.read_bytes()[:-40])
    assert read_traces(file) is None
    assert read_traces(tmp_path / "none") is None
