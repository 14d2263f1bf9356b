"""An engine's weight layout, read off SGLang's own `load_weights` instead of guessed.

    trace_live       in a TP rank of a running engine, over its live parameters; nothing is written
    trace_layouts    without an engine: every TP rank's model on the meta device (`offline_trace`)

A local box has as many dimensions as the Hugging Face tensor: where the parameter has more (experts stacked in one),
its leading dimensions count as one. `fold` looks at a parameter that way.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Box, Piece, TensorSpec, WeightLayout, extent
from megarl.reshard.transfer.bucket import dtype_name, torch_dtype
from megarl.rollout.sglang.weight_layout.load_recorder import END, Memory, Origin, Recorder, locate

NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Padding:
    """A box of a parameter that the loader fills with a constant."""

    local: str
    local_box: Box
    value: float


@dataclass(frozen=True, slots=True)
class EngineTrace:
    """What one TP rank does with the model's tensors."""

    layout: WeightLayout
    """The dtype of a tensor is that of the parameter it goes to."""
    padding: tuple[Padding, ...]
    derived: tuple[str, ...]
    """Tensors of which the loader computes something: they must go through `load_weights`, boxes are not enough."""


def trace_live(
    model: nn.Module, tensors: Mapping[str, TensorSpec], *, must_cover: Collection[str] | None = None
) -> EngineTrace:
    """What `model.load_weights` would do with tensors of these names and shapes; it does nothing.

    Args:
        must_cover: parameters that `tensors` must fill; None: all.

    Raises:
        WeightSyncError: part of such a parameter would stay as it is.
    """
    targets = own_tensors(model)
    sources = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta") for name, spec in tensors.items()
    }
    recorder = Recorder(sources, targets)
    load_weights: Any = model.load_weights
    with torch.no_grad(), _threads_inline(), recorder:
        load_weights(recorder.feed(sources))
    _refuse_replaced(model, targets)
    parameters = {name for name, _ in model.named_parameters()}
    filled = parameters if must_cover is None else parameters.intersection(must_cover)
    return _read(model, tensors, targets, recorder, filled)


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those that are one tensor under several names once."""
    named: dict[str, Tensor] = {name: p.data for name, p in model.named_parameters()}
    return named | {name: b for name, b in model.named_buffers() if b is not None}


def fold(tensor: Tensor, num_dims: int) -> Tensor:
    """A view with `num_dims` dimensions, the leading ones taken together."""
    if tensor.dim() <= num_dims:
        return tensor
    return tensor.view(-1, *tensor.shape[tensor.dim() - num_dims + 1 :]) if num_dims else tensor.view(())


def _read(
    model: nn.Module,
    tensors: Mapping[str, TensorSpec],
    targets: Mapping[str, Tensor],
    recorder: Recorder,
    parameters: Collection[str],
) -> EngineTrace:
    pieces: list[Piece] = []
    padding: list[Padding] = []
    derived = set(recorder.derived)
    dtypes: dict[str, str] = {}
    uncovered: list[str] = []
    for local, memory in recorder.targets.items():
        for box, origin in sorted(memory.origins.items()):
            piece = _piece(local, memory, box, origin, tensors) if origin.tensor else None
            if piece is not None:
                pieces.append(piece)
                dtypes.setdefault(piece.tensor, dtype_name(targets[local].dtype))
            elif origin.value is not None:
                padding.append(Padding(local, box, origin.value))
            else:
                derived.add(origin.cause or origin.tensor or END)
        hole = memory.covered.missing(tuple((0, n) for n in memory.shape)) if prod(memory.shape) else None
        if hole is not None and local in parameters:
            uncovered.append(f"{local} {list(memory.shape)} at {box_text(hole)}")
    if uncovered:
        raise WeightSyncError(
            f"load_weights leaves {len(uncovered)} of {len(parameters)} parameters as they are: {listing(uncovered)}"
        )
    if END in derived and not hasattr(model, "post_load_weights"):
        raise WeightSyncError(
            f"load_weights of {type(model).__name__} computes values after its last tensor, and has no "
            f"post_load_weights to compute them again"
        )
    specs = {name: TensorSpec(spec.shape, dtypes.get(name, spec.dtype)) for name, spec in tensors.items()}
    in_order = {name: i for i, name in enumerate(tensors)}
    pieces.sort(key=lambda piece: (in_order[piece.tensor], piece.box, piece.local))
    named = tuple(sorted(derived - {END}, key=in_order.__getitem__))
    return EngineTrace(WeightLayout(specs, tuple(pieces)), tuple(padding), named)


def _piece(local: str, memory: Memory, box: Box, origin: Origin, tensors: Mapping[str, TensorSpec]) -> Piece | None:
    """None where the elements do not lie in the parameter as they do in the tensor (transposed, repeated)."""
    assert origin.tensor is not None
    shape = tensors[origin.tensor].shape
    there = locate(origin.offset, extent(box), origin.strides, shape)
    if there is None:
        return None
    order = [dim for dim in there.dims if dim is not None]
    local_box = folded_box(box, memory.shape, len(shape))
    if order != sorted(order) or local_box is None or extent(local_box) != extent(there.box):
        return None
    return Piece(origin.tensor, there.box, local, local_box)


def folded_box(box: Box, shape: tuple[int, ...], num_dims: int) -> Box | None:
    """The box in `fold(tensor, num_dims)`; None where it is no box there, or the tensor has fewer dimensions."""
    extra = len(box) - num_dims
    if extra <= 0:
        return box if extra == 0 else None
    if num_dims == 0 or any(stop - start != 1 for start, stop in box[:extra]):
        return () if num_dims == 0 and prod(shape) == 1 else None
    row = 0
    for (start, _), length in zip(box[: extra + 1], shape[: extra + 1], strict=True):
        row = row * length + start
    first = box[extra]
    return ((row, row + first[1] - first[0]), *box[extra + 1 :])


def _refuse_replaced(model: nn.Module, targets: Mapping[str, Tensor]) -> None:
    replaced = []
    for name, p in model.named_parameters():
        if p.data.untyped_storage()._cdata != targets[name].untyped_storage()._cdata:
            p.data = targets[name]
            replaced.append(name)
    if replaced:
        raise WeightSyncError(f"load_weights gives {len(replaced)} parameters new memory: {listing(replaced)}")


def box_text(box: Box) -> str:
    """As an index: `[0:4, 2:6]`."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def listing(names: list[str]) -> str:
    """The first few, and how many more there are."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


class _Inline(concurrent.futures.Executor):
    """Runs what it is given at once: a dispatch mode is its thread's own, and some loaders use several."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as e:  # noqa: BLE001 -- raised again where the result is asked for
            future.set_exception(e)
        return future


@contextlib.contextmanager
def _threads_inline() -> Iterator[None]:
    before = concurrent.futures.ThreadPoolExecutor
    concurrent.futures.ThreadPoolExecutor = _Inline  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        concurrent.futures.ThreadPoolExecutor = before  # type: ignore[misc]
