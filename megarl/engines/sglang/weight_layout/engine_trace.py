"""Traces an engine's weight layout by recording SGLang's own `load_weights`.

    trace_live       in a TP rank of a running engine, with its live parameters; nothing is written
    trace_layouts    without an engine: every TP rank's model on the meta device (`offline_trace`)

A local box has as many dimensions as the Hugging Face tensor. If the parameter has more (stacked experts), its leading
dimensions are merged into one; if it has one less, its last dimension is split into pairs (`paired_shape`). `fold`
returns this view of a parameter. A local name that ends in `TRANSPOSED` means the parameter with its last two
dimensions swapped.

Identical layers are traced once: DeepSeek-V3 has 45,000 tensors, but only two kinds of layers.

    layers 0 1 2     dense        the first layer of each kind is traced,
    layers 3 .. 60   experts      the others get its pieces with their own layer numbers

Layers are identical if they consist of the same modules, with parameters of the same shapes and dtypes, and their
tensors have the same shapes. That the loader treats them identically is an assumption; callers check it against full
traces (`megarl.engines.sglang.weight_layout.trace_child`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megarl.engines.sglang.weight_layout.load_recorder import (
    AFTER_LAST_TENSOR,
    Recorder,
    StorageContents,
    ValueSource,
    find_box,
)
from megarl.errors import WeightSyncError
from megarl.model_files.weight_index import paired_shape, stored_shape
from megarl.reshard.layout.layout import (
    Box,
    PieceTable,
    ShardPiece,
    TensorSpec,
    WeightLayout,
    extent,
    merge_specs,
    share_tensors,
)
from megarl.reshard.layout.model_tensors import ModelTensors, Names
from megarl.reshard.transfer.bucket import dtype_name, torch_dtype

MAX_NAMES_SHOWN = 8

TRANSPOSED = ".mT"
"""Suffix of the local name of a parameter that is seen with its last two dimensions swapped."""

CONSTANT_PARAMETERS = (".k_scale", ".v_scale")
"""Ends of the names of scalars that SGLang sets to 1 if a folder lacks them: scales of an FP8 KV cache."""


@dataclass(frozen=True, slots=True)
class Padding:
    """A box of a parameter that the loader fills with a constant."""

    local: str
    local_box: Box
    value: float


@dataclass(frozen=True, slots=True)
class EngineTrace:
    """How one TP rank loads the model's tensors."""

    layout: WeightLayout
    """Layout of the rank's parameters; a tensor's dtype is that of the parameter it is loaded into."""
    padding: tuple[Padding, ...]
    derived: tuple[str, ...]
    """Tensors from which the loader computes values; they must be loaded in full, by the loader."""
    computed: frozenset[str] = field(default=frozenset(), compare=False)
    """Parameters and buffers that hold such values, by name; of `trace_live`, files of traces leave them out."""

    def without(self, names: Collection[str]) -> EngineTrace:
        """Return the trace without tensors `names`, whose parameters keep the values that they have."""
        if not names:
            return self
        kept = {name: spec for name, spec in self.layout.tensors.items() if name not in names}
        pieces = tuple(piece for piece in self.layout.pieces if piece.tensor not in names)
        derived = tuple(name for name in self.derived if name not in names)
        return EngineTrace(WeightLayout(kept, pieces), self.padding, derived, self.computed)


def trace_live(
    model: nn.Module, tensors: Mapping[str, TensorSpec], *, must_cover: Collection[str] | None = None
) -> EngineTrace:
    """Trace what `model.load_weights` would do with tensors of these names and shapes, without writing anything.

    Args:
        tensors: shapes as in files; those of the trace are `paired_shape`.
        must_cover: parameters that `tensors` must fill; None: all.

    Raises:
        WeightSyncError: part of such a parameter would not be written.
    """
    targets = model_tensors(model)
    sources = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta") for name, spec in tensors.items()
    }
    recorder = Recorder(sources, targets)
    load_weights: Any = model.load_weights
    with torch.no_grad(), _run_threads_inline(), recorder:
        load_weights(recorder.feed(sources))
    _reject_replaced_parameters(model, targets)
    parameters = {name for name, _ in model.named_parameters()}
    filled = parameters if must_cover is None else parameters.intersection(must_cover)
    seen = {name: replace(spec, shape=paired_shape(name, spec.shape, tensors)) for name, spec in tensors.items()}
    pieces: list[ShardPiece] = []
    padding: list[Padding] = []
    derived, computed = set(recorder.derived), set[str]()
    dtypes: dict[str, str] = {}
    uncovered: list[str] = []
    for local, contents in recorder.targets.items():
        for box, source in sorted(contents.sources.items()):
            piece = _piece(local, contents, box, source, seen) if source.tensor else None
            if piece is not None:
                pieces.append(piece)
                dtypes.setdefault(piece.tensor, dtype_name(targets[local].dtype))
            elif source.value is not None:
                padding.append(Padding(local, box, source.value))
            else:
                derived.add(source.cause or source.tensor or AFTER_LAST_TENSOR)
                computed.add(local)
        hole = contents.covered.first_gap(tuple((0, n) for n in contents.shape)) if prod(contents.shape) else None
        if hole is not None and local in filled and not (hole == () and local.endswith(CONSTANT_PARAMETERS)):
            uncovered.append(f"{local} {list(contents.shape)} at {box_text(hole)}")
    if uncovered:
        raise WeightSyncError(
            f"load_weights leaves parts of {len(uncovered)} of {len(filled)} parameters unwritten: "
            f"{join_names(uncovered)}"
        )
    if AFTER_LAST_TENSOR in derived and not hasattr(model, "post_load_weights"):
        raise WeightSyncError(
            f"load_weights of {type(model).__name__} computes values after its last tensor, and the model has no "
            f"post_load_weights to recompute them"
        )
    specs = {name: TensorSpec(spec.shape, dtypes.get(name, spec.dtype)) for name, spec in seen.items()}
    in_order = {name: i for i, name in enumerate(tensors)}
    pieces.sort(key=lambda piece: (in_order[piece.tensor], piece.box, piece.local))
    named = tuple(sorted(derived - {AFTER_LAST_TENSOR}, key=in_order.__getitem__))
    return EngineTrace(WeightLayout(specs, tuple(pieces)), tuple(padding), named, frozenset(computed))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; a tensor with several names appears once."""
    return {name: p.data for name, p in model.named_parameters()} | dict(model.named_buffers())


def fold(tensor: Tensor, num_dims: int) -> Tensor:
    """Return a view with `num_dims` dimensions: leading dimensions are merged, or the last one is split into pairs."""
    if tensor.dim() < num_dims:
        return tensor.view(*tensor.shape[:-1], -1, 2)
    if tensor.dim() == num_dims:
        return tensor
    return tensor.view(-1, *tensor.shape[tensor.dim() - num_dims + 1 :]) if num_dims else tensor.view(())


def _piece(
    local: str, contents: StorageContents, box: Box, source: ValueSource, tensors: Mapping[str, TensorSpec]
) -> ShardPiece | None:
    """Return the piece; None if the parameter stores the elements in a different order (repeated, or permuted)."""
    assert source.tensor is not None
    shape = tensors[source.tensor].shape
    is_paired = stored_shape(source.tensor, shape) != shape
    dims = list(zip(box, contents.shape, source.strides, strict=True))
    views = [(local, dims)]
    if len(dims) > 2:
        views.append((local + TRANSPOSED, [*dims[:-2], dims[-1], dims[-2]]))
    for name, seen in views:
        view = _split_pairs(seen) if is_paired else seen
        if not view and is_paired:
            continue
        box, whole, strides = (tuple(each) for each in zip(*view, strict=True)) if view else ((), (), ())
        there = find_box(source.offset, extent(box), strides, shape)
        if there is None:
            continue
        order = [dim for dim in there.dims if dim is not None]
        local_box = folded_box(box, whole, len(shape))
        if order == sorted(order) and local_box is not None and extent(local_box) == extent(there.box):
            return ShardPiece(source.tensor, there.box, name, local_box)
    return None


_Dim = tuple[tuple[int, int], int, int]
"""Range of a box, size and stride of a dimension."""


def _split_pairs(dims: list[_Dim]) -> list[_Dim] | None:
    """Return the dimensions with the last one split into pairs; None if it does not consist of pairs in a row."""
    *rest, ((start, stop), size, stride) = dims
    if stride != 1 or start % 2 or stop % 2 or size % 2:
        return None
    return [*rest, ((start // 2, stop // 2), size // 2, 2), ((0, 2), 2, 1)]


def folded_box(box: Box, shape: tuple[int, ...], num_dims: int) -> Box | None:
    """Return the box in `fold(tensor, num_dims)`; None if it is no box there or the tensor has fewer dimensions."""
    extra = len(box) - num_dims
    if extra <= 0:
        return box if extra == 0 else None
    if num_dims == 0 or any(stop - start != 1 for start, stop in box[:extra]):
        return () if num_dims == 0 and prod(shape) == 1 else None
    row = 0
    for (start, _), length in zip(box[: extra + 1], shape[: extra + 1], strict=True):
        row = row * length + start
    start, stop = box[extra]
    return ((row, row + stop - start), *box[extra + 1 :])


def _reject_replaced_parameters(model: nn.Module, targets: Mapping[str, Tensor]) -> None:
    replaced = []
    for name, p in model.named_parameters():
        if p.data.untyped_storage()._cdata != targets[name].untyped_storage()._cdata:
            p.data = targets[name]
            replaced.append(name)
    if replaced:
        raise WeightSyncError(f"load_weights reallocates {len(replaced)} parameters: {join_names(replaced)}")


def box_text(box: Box) -> str:
    """Format the box as an index: `[0:4, 2:6]`."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def join_names(names: list[str]) -> str:
    """Join the first names; append how many more there are."""
    more = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


@contextlib.contextmanager
def _run_threads_inline() -> Iterator[None]:
    """Run what this thread gives to thread pools at once: dispatch modes are per thread, and some loaders use pools."""
    before, this_thread = ThreadPoolExecutor.submit, threading.get_ident()

    def submit[T](pool: ThreadPoolExecutor, fn: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        if threading.get_ident() != this_thread:
            return before(pool, fn, *args, **kwargs)
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))  # an error ends the trace here, not where the result is read
        return future

    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = before  # type: ignore[method-assign]


def encode_traces(traces: Sequence[EngineTrace]) -> bytes:
    """Encode the traces of an engine's ranks, which load the same tensors, as compressed JSON."""
    tensors = merge_specs(trace.layout for trace in traces)
    names = Names(tensors)
    ranks = []
    for trace in traces:
        table = trace.layout.pieces.renumbered(names)
        ranks.append(
            {
                "pieces": base64.b64encode(table.to_bytes()).decode(),
                "locals": list(table.locals),
                "padding": [[pad.local, pad.local_box, pad.value] for pad in trace.padding],
                "derived": trace.derived,
            }
        )
    content = {"tensors": [[name, spec.shape, spec.dtype] for name, spec in tensors.items()], "ranks": ranks}
    return zlib.compress(json.dumps(content).encode())


def read_traces(file: Path) -> list[EngineTrace] | None:
    """Read a file with what `encode_traces` returns; None if the file is missing or invalid."""
    try:
        return decode_traces(file.read_bytes())
    except (OSError, zlib.error, ValueError, KeyError):
        return None


def decode_traces(encoded: bytes) -> list[EngineTrace]:
    """Decode what `encode_traces` returns, with pieces as `PieceTable`s."""
    content = json.loads(zlib.decompress(encoded))
    tensors = ModelTensors({name: TensorSpec(tuple(shape), dtype) for name, shape, dtype in content["tensors"]})
    traces: list[EngineTrace] = []
    for rank in content["ranks"]:
        table = PieceTable.from_bytes(base64.b64decode(rank["pieces"]), tensors.names)
        layout = WeightLayout(tensors, table.with_locals(Names(rank["locals"])))
        padding = tuple(Padding(local, tuple(map(tuple, box)), value) for local, box, value in rank["padding"])
        traces.append(EngineTrace(layout, padding, tuple(rank["derived"])))
    layouts = share_tensors([trace.layout for trace in traces])
    return [replace(trace, layout=layout) for trace, layout in zip(traces, layouts, strict=True)]


def find_identical_layers(model: nn.Module, tensors: Mapping[str, TensorSpec]) -> dict[int, int]:
    """Return, by layer of `model`, the first of the layers identical to it, including the `tensors` that they load."""
    traits: dict[int, set[object]] = defaultdict(set)
    modules = ((name, type(module)) for name, module in model.named_modules())
    held = ((name, (tuple(tensor.shape), tensor.dtype)) for name, tensor in model_tensors(model).items())
    for name, trait in chain(modules, held, tensors.items()):
        head, layer, tail = _split_layer(name)
        if layer is not None:
            traits[layer].add((head, tail, trait))
    first: dict[frozenset[object], int] = {}
    return {layer: first.setdefault(frozenset(traits[layer]), layer) for layer in sorted(traits)}


def trace_deduplicated(model: nn.Module, tensors: Mapping[str, TensorSpec]) -> EngineTrace | None:
    """Trace as `trace_live` does, but only the first of identical layers; pieces are a `PieceTable`.

    Returns:
        None if the first layers cannot be traced alone: their tensors do not fill all of their parameters, or are
        loaded into another layer.
    """
    first_of = find_identical_layers(model, tensors)

    def representative(name: str) -> str:
        """Return the name in the first of the layers like the name's own."""
        layer = _split_layer(name)[1]
        return name if layer is None else _in_layer(name, first_of[layer])

    covered = {name for name in model_tensors(model) if representative(name) == name}
    try:
        trace = trace_live(
            model, {name: spec for name, spec in tensors.items() if representative(name) == name}, must_cover=covered
        )
    except WeightSyncError:
        return None
    pieces_of: dict[str, list[ShardPiece]] = defaultdict(list)
    for piece in trace.layout.pieces:
        if _split_layer(piece.tensor)[1] != _split_layer(piece.local)[1]:
            return None
        pieces_of[piece.tensor].append(piece)
    padding_of: dict[str, list[Padding]] = defaultdict(list)
    for pad in trace.padding:
        padding_of[pad.local].append(pad)
    specs = {
        name: TensorSpec(paired_shape(name, spec.shape, tensors), trace.layout.tensors[representative(name)].dtype)
        for name, spec in tensors.items()
    }
    pieces = (
        ShardPiece(name, piece.box, _in_layer(piece.local, _split_layer(name)[1]), piece.local_box)
        for name in tensors
        for piece in pieces_of[representative(name)]
    )
    padding = (replace(pad, local=name) for name in model_tensors(model) for pad in padding_of[representative(name)])
    derived = tuple(name for name in tensors if representative(name) in trace.derived)
    return EngineTrace(WeightLayout(specs, PieceTable.pack(pieces)), tuple(padding), derived)


def _in_layer(name: str, layer: int | None) -> str:
    """Return the name in another layer; names outside the layers stay as they are."""
    head, own, tail = _split_layer(name)
    return name if own is None else f"{head}{layer}{tail}"


def _split_layer(name: str) -> tuple[str, int | None, str]:
    """Split into e.g. `model.layers.`, 7, `.mlp.gate.weight`; the number is None outside the layers."""
    head, found, rest = name.partition("layers.")
    number, _, _ = rest.partition(".")
    return (head + found, int(number), rest[len(number) :]) if number.isdecimal() else (name, None, "")
