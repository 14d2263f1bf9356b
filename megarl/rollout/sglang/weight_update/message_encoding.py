"""Plain-data encoding of traces and box buckets: names are listed once and referred to by index."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.model_files.json_object import JsonMapping, JsonObject
from megarl.reshard.layout.layout import Box, ShardPiece, TensorSpec, WeightLayout
from megarl.reshard.transfer.bucket import BoxBucket, BoxSlot
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
                [names[p.tensor], _flat(p.box), local_index(p.local), _flat(p.local_box)] for p in trace.layout.pieces
            ],
            "padding": [[local_index(p.local), _flat(p.local_box), p.value] for p in trace.padding],
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
                tuple(ShardPiece(names[t], _box(box), locals_[n], _box(there)) for t, box, n, there in rank["pieces"]),
            ),
            tuple(Padding(locals_[n], _box(box), value) for n, box, value in rank["padding"]),
            tuple(names[t] for t in rank["derived"]),
        )
        for rank in data["ranks"]
    ]


def encode_boxes(bucket: BoxBucket) -> JsonObject:
    """Encode a bucket as JSON data."""
    slots = [[s.local, _flat(s.local_box), s.dtype, s.offset] for s in bucket.slots]
    return {"path": bucket.path, "num_bytes": bucket.num_bytes, "slots": slots}


def decode_boxes(data: JsonMapping) -> BoxBucket:
    """Decode the data of `encode_boxes`."""
    slots = tuple(BoxSlot(local, _box(box), dtype, offset) for local, box, dtype, offset in data["slots"])
    return BoxBucket(data["path"], data["num_bytes"], slots)


def _flat(box: Box) -> list[int]:
    return [edge for side in box for edge in side]


def _box(flat: list[int]) -> Box:
    return tuple(zip(flat[::2], flat[1::2], strict=True))
