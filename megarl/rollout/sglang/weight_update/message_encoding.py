"""Plain-data encoding of traces: names are listed once and referred to by index."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.model_files.json_object import JsonMapping, JsonObject
from megarl.reshard.layout.layout import Box, ShardPiece, TensorSpec, WeightLayout
from megarl.rollout.sglang.weight_layout.engine_trace import EngineTrace, Padding


def encode_traces(traces: Sequence[EngineTrace]) -> JsonObject:
    """Encode an engine's traces, which share names and tensors, as JSON data."""
    tensors: dict[str, TensorSpec] = {}
    for trace in traces:
        tensors |= trace.layout.tensors
    names = {name: i for i, name in enumerate(tensors)}
    locals_: dict[str, int] = {}

    def local_index(local: str) -> int:
        return locals_.setdefault(local, len(locals_))

    ranks = [
        {
            "pieces": [
                [names[p.tensor], encode_box(p.box), local_index(p.local), encode_box(p.local_box)]
                for p in trace.layout.pieces
            ],
            "padding": [[local_index(p.local), encode_box(p.local_box), p.value] for p in trace.padding],
            "derived": [names[name] for name in trace.derived],
        }
        for trace in traces
    ]
    specs = [[name, list(spec.shape), spec.dtype] for name, spec in tensors.items()]
    return {"tensors": specs, "locals": list(locals_), "ranks": ranks}


def decode_traces(data: JsonMapping) -> list[EngineTrace]:
    """Decode the data of `encode_traces`."""
    tensors = {name: TensorSpec(tuple(shape), dtype) for name, shape, dtype in data["tensors"]}
    names, locals_ = list(tensors), data["locals"]
    return [
        EngineTrace(
            WeightLayout(
                tensors,
                tuple(
                    ShardPiece(names[t], decode_box(box), locals_[n], decode_box(there))
                    for t, box, n, there in rank["pieces"]
                ),
            ),
            tuple(Padding(locals_[n], decode_box(box), value) for n, box, value in rank["padding"]),
            tuple(names[t] for t in rank["derived"]),
        )
        for rank in data["ranks"]
    ]


def encode_box(box: Box) -> list[int]:
    """Encode a box as a flat list of its edges."""
    return [edge for side in box for edge in side]


def decode_box(flat: list[int]) -> Box:
    """Decode the list of `encode_box`."""
    return tuple(zip(flat[::2], flat[1::2], strict=True))
