"""Layers that are alike are traced once: DeepSeek-V3 has 45,000 tensors, but only two kinds of layer.

    layers 0 1 2     dense        the first of each kind is traced,
    layers 3 .. 60   experts      the others get its pieces under their own numbers

Alike are layers that are built of the same modules, with parameters of the same shapes and dtypes, and whose tensors
have the same shapes. That their loader then treats them alike is an assumption; whoever uses it checks it against whole
traces (`megarl.rollout.sglang.weight_layout.trace_child`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Piece, PieceTable, TensorSpec, WeightLayout
from megarl.rollout.sglang.weight_layout.engine_trace import EngineTrace, Padding, own_tensors, trace_live

Alike = Mapping[int, list[int]]
"""First layer of its kind -> all layers of that kind, itself among them."""


def layers_alike(model: nn.Module, tensors: Mapping[str, TensorSpec]) -> dict[int, list[int]]:
    """The layers of `model`, which loads `tensors`, by kind; in order."""
    traits: dict[int, set[object]] = defaultdict(set)
    for name, module in model.named_modules():
        _note(traits, name, type(module))
    for name, tensor in own_tensors(model).items():
        _note(traits, name, (tuple(tensor.shape), tensor.dtype))
    for name, spec in tensors.items():
        _note(traits, name, spec)
    kinds: dict[frozenset[object], list[int]] = defaultdict(list)
    for layer in sorted(traits):
        kinds[frozenset(traits[layer])].append(layer)
    return {layers[0]: layers for layers in kinds.values()}


def trace_one_of_each(model: nn.Module, tensors: Mapping[str, TensorSpec], alike: Alike) -> EngineTrace | None:
    """As `trace_live`, but with pieces as a `PieceTable`, and tracing only the first layer of each kind.

    Returns:
        None where the first layers do not stand for themselves: their tensors leave part of their parameters as they
        are, or go to another layer.
    """
    fed = {name: spec for name, spec in tensors.items() if _is_first(name, alike)}
    covered = {name for name in own_tensors(model) if _is_first(name, alike)}
    try:
        trace = trace_live(model, fed, must_cover=covered)
    except WeightSyncError:
        return None
    if any(_split(p.tensor)[1] != _split(p.local)[1] for p in trace.layout.pieces):
        return None
    first_of = {layer: first for first, layers in alike.items() for layer in layers}

    def stands_for(name: str) -> str:
        head, layer, tail = _split(name)
        return name if layer is None else f"{head}{first_of[layer]}{tail}"

    traced = trace.layout.tensors
    specs = {name: replace(spec, dtype=traced[stands_for(name)].dtype) for name, spec in tensors.items()}
    return EngineTrace(
        WeightLayout(specs, _spread_pieces(trace.layout.pieces, specs, alike)),
        _spread_padding([pad for pad in trace.padding if _is_first(pad.local, alike)], own_tensors(model), alike),
        tuple(name for name in tensors if stands_for(name) in trace.derived),
    )


def _spread_pieces(pieces: Iterable[Piece], specs: Mapping[str, TensorSpec], alike: Alike) -> PieceTable:
    of_tensor: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        copies = zip(_spread(piece.tensor, alike), _spread(piece.local, alike), strict=True)
        for tensor, local in copies:
            of_tensor[tensor].append(Piece(tensor, piece.box, local, piece.local_box))
    return PieceTable.pack(piece for tensor in specs for piece in of_tensor.get(tensor, ()))


def _spread_padding(padding: Iterable[Padding], locals_: Iterable[str], alike: Alike) -> tuple[Padding, ...]:
    of_local: dict[str, list[Padding]] = defaultdict(list)
    for pad in padding:
        for local in _spread(pad.local, alike):
            of_local[local].append(replace(pad, local=local))
    return tuple(pad for local in locals_ for pad in of_local.get(local, ()))


def _spread(name: str, alike: Alike) -> list[str]:
    """The names that `name`, of the first layer of its kind or of no layer, stands for."""
    head, layer, tail = _split(name)
    return [name] if layer is None else [f"{head}{other}{tail}" for other in alike[layer]]


def _note(traits: dict[int, set[object]], name: str, trait: object) -> None:
    head, layer, tail = _split(name)
    if layer is not None:
        traits[layer].add((head, tail, trait))


def _is_first(name: str, alike: Alike) -> bool:
    layer = _split(name)[1]
    return layer is None or layer in alike


def _split(name: str) -> tuple[str, int | None, str]:
    """`model.layers.`, 7, `.mlp.gate.weight`; the number is None where it is in no layer."""
    head, found, rest = name.partition("layers.")
    number, _, _ = rest.partition(".")
    return (head + found, int(number), rest[len(number) :]) if number.isdecimal() else (name, None, "")
