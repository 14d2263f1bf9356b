"""Traces identical layers once: DeepSeek-V3 has 45,000 tensors, but only two groups of layers.

    layers 0 1 2     dense        the first layer of each group is traced,
    layers 3 .. 60   experts      the others get its pieces with their own layer numbers

Layers are identical if they consist of the same modules, with parameters of the same shapes and dtypes, and their
tensors have the same shapes. That the loader treats them identically is an assumption; callers check it against full
traces (`megarl.rollout.sglang.weight_layout.trace_child`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import PieceTable, ShardPiece, TensorSpec, WeightLayout
from megarl.rollout.sglang.weight_layout.engine_trace import EngineTrace, Padding, model_tensors, trace_live

LayerGroups = Mapping[int, list[int]]
"""First layer of each group -> all layers of the group, the first included."""


def group_identical_layers(model: nn.Module, tensors: Mapping[str, TensorSpec]) -> dict[int, list[int]]:
    """Group the layers of `model` that are identical, including the `tensors` that they load."""
    traits: dict[int, set[object]] = defaultdict(set)
    for name, module in model.named_modules():
        _add_trait(traits, name, type(module))
    for name, tensor in model_tensors(model).items():
        _add_trait(traits, name, (tuple(tensor.shape), tensor.dtype))
    for name, spec in tensors.items():
        _add_trait(traits, name, spec)
    groups: dict[frozenset[object], list[int]] = defaultdict(list)
    for layer in sorted(traits):
        groups[frozenset(traits[layer])].append(layer)
    return {layers[0]: layers for layers in groups.values()}


def trace_deduplicated(
    model: nn.Module, tensors: Mapping[str, TensorSpec], layer_groups: LayerGroups
) -> EngineTrace | None:
    """Trace as `trace_live` does, but only the first layer of each group; pieces are a `PieceTable`.

    Returns:
        None if the first layers cannot be traced alone: their tensors do not fill all of their parameters, or are
        loaded into another layer.
    """
    traced_tensors = {name: spec for name, spec in tensors.items() if _is_traced(name, layer_groups)}
    covered = {name for name in model_tensors(model) if _is_traced(name, layer_groups)}
    try:
        trace = trace_live(model, traced_tensors, must_cover=covered)
    except WeightSyncError:
        return None
    if any(_split_layer(p.tensor)[1] != _split_layer(p.local)[1] for p in trace.layout.pieces):
        return None
    first_of = {layer: first for first, layers in layer_groups.items() for layer in layers}

    def representative(name: str) -> str:
        head, layer, tail = _split_layer(name)
        return name if layer is None else f"{head}{first_of[layer]}{tail}"

    traced = trace.layout.tensors
    specs = {name: replace(spec, dtype=traced[representative(name)].dtype) for name, spec in tensors.items()}
    return EngineTrace(
        WeightLayout(specs, _expand_pieces(trace.layout.pieces, specs, layer_groups)),
        _expand_padding(
            [pad for pad in trace.padding if _is_traced(pad.local, layer_groups)], model_tensors(model), layer_groups
        ),
        tuple(name for name in tensors if representative(name) in trace.derived),
    )


def _expand_pieces(
    pieces: Iterable[ShardPiece], specs: Mapping[str, TensorSpec], layer_groups: LayerGroups
) -> PieceTable:
    of_tensor: dict[str, list[ShardPiece]] = defaultdict(list)
    for piece in pieces:
        copies = zip(_expand_name(piece.tensor, layer_groups), _expand_name(piece.local, layer_groups), strict=True)
        for tensor, local in copies:
            of_tensor[tensor].append(ShardPiece(tensor, piece.box, local, piece.local_box))
    return PieceTable.pack(piece for tensor in specs for piece in of_tensor.get(tensor, ()))


def _expand_padding(
    padding: Iterable[Padding], locals_: Iterable[str], layer_groups: LayerGroups
) -> tuple[Padding, ...]:
    of_local: dict[str, list[Padding]] = defaultdict(list)
    for pad in padding:
        for local in _expand_name(pad.local, layer_groups):
            of_local[local].append(replace(pad, local=local))
    return tuple(pad for local in locals_ for pad in of_local.get(local, ()))


def _expand_name(name: str, layer_groups: LayerGroups) -> list[str]:
    """Return the names that `name` represents: those in all layers of its group, or itself outside the layers."""
    head, layer, tail = _split_layer(name)
    return [name] if layer is None else [f"{head}{other}{tail}" for other in layer_groups[layer]]


def _add_trait(traits: dict[int, set[object]], name: str, trait: object) -> None:
    head, layer, tail = _split_layer(name)
    if layer is not None:
        traits[layer].add((head, tail, trait))


def _is_traced(name: str, layer_groups: LayerGroups) -> bool:
    layer = _split_layer(name)[1]
    return layer is None or layer in layer_groups


def _split_layer(name: str) -> tuple[str, int | None, str]:
    """Split into e.g. `model.layers.`, 7, `.mlp.gate.weight`; the number is None outside the layers."""
    head, found, rest = name.partition("layers.")
    number, _, _ = rest.partition(".")
    return (head + found, int(number), rest[len(number) :]) if number.isdecimal() else (name, None, "")
