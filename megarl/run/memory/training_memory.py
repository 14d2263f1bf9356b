"""Bytes of parameters, gradients and optimizer state of a trainer rank, as megatron-core allocates them.

Per parameter, in bfloat16 with gradients and optimizer state in float32 (s: ranks that share the optimizer state):

                      all ranks alike    distributed optimizer
    parameters        2                  2
    gradients         4                  4
    main parameters   4                  4 / s
    Adam's moments    8                  8 / s
                      18                 6 + 12 / s

Libraries also keep what `CacheBytes` counts between passes.

Another optimizer has its own state in the place of the moments, 4 bytes with momentum and none for plain SGD.

s is dp * cp, for routed experts the number of ranks that hold the same shard of the same experts. All ranks of a
pipeline stage hold equally much; stages differ. In float32 there are no separate main parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm, prod

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.megatron import MegatronConfig
from megarl.megatron.families.architecture import EMBEDDING, HEAD, ModelArchitecture
from megarl.megatron.families.parameter_map import ParameterMap, local_shape
from megarl.megatron.families.trainer_layouts import PipelineSplit, padded_vocab, stage_layers
from megarl.run.memory.activations import HeadKind

PARAMETER_MULTIPLE, BUCKET_MULTIPLE = 64, 128
"""With the distributed optimizer, parameters start at multiples of so many elements of megatron-core's buffers, and
buckets end at multiples (`_ParamAndGradBuffer`)."""

_LINEAR = re.compile(r"\.(linear_\w+|in_proj|out_proj)\.weight\d*$")

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes per element of each kind of training state."""

    parameters: int
    gradients: int
    main_parameters: int
    moments: int
    """Both of Adam's moments together, or the state of another optimizer."""
    quantized: int = 0
    """FP8 copies of the weights of linear layers, without their scales: one for products with the weight, and one for
    products with its transpose, which only backward passes need."""

    @classmethod
    def of(cls, dtype: str, megatron: MegatronConfig | None = None) -> ElementBytes:
        """Return the bytes for parameters of a dtype, `bfloat16` or `float32`.

        Args:
            megatron: fields that choose other dtypes, or keep Adam on the host; None: megarl's own.
        """
        megatron = megatron or MegatronConfig()
        optimizer, size = megatron.optimizer, DTYPE_BYTES[dtype]
        moments = sum(DTYPE_BYTES[optimizer.get(name, "float32")] for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
        # with a part of Adam on the host, the device is planned for all of it
        is_on_host = megatron.offloads_adam and optimizer.get("optimizer_offload_fraction", 1.0) == 1.0
        return cls(
            parameters=size,
            gradients=DTYPE_BYTES["float32"] if megatron.ddp.get("grad_reduce_in_fp32", True) else size,
            main_parameters=0 if is_on_host or dtype == "float32" else DTYPE_BYTES["float32"],
            moments=0 if is_on_host else moments,
            quantized=2 if megatron.model.get("fp8") else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes that one rank holds of a model."""

    parameters: int
    gradients: int = 0
    main_parameters: int = 0
    moments: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return self.parameters + self.gradients + self.main_parameters + self.moments


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBytes:
    """Bytes that libraries keep on one rank from the first pass until an offload frees them."""

    quantized: int = 0
    """FP8 copies of the weights of linear layers, by Transformer Engine."""
    dummy_gradients: int = 0
    """What autograd gets where a layer adds a weight's gradient to `main_grad` itself: one per shape of a weight."""


@dataclass(slots=True)
class ChunkParameters:
    """Elements of each parameter that one rank holds of a model chunk."""

    dense: list[int] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)
    """Parameters of routed experts."""
    shared: list[int] = field(default_factory=list)
    """A tied embedding that two pipeline stages hold: it has a bucket of its own."""
    float32: list[int] = field(default_factory=list)
    """Dense parameters that are float32 in a bfloat16 model: they have a buffer of their own."""
    untrained_bytes: int = 0
    """Tensors without gradient: MTP layers, and expert biases of routers."""
    linears: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the weights of the decoder's linear layers, which are also among `dense` and `experts`."""


def chunk_parameters(
    model: ModelArchitecture, grid: RankGrid, split: PipelineSplit, element_bytes: int
) -> list[list[ChunkParameters]]:
    """Return what a rank holds, indexed [stage][chunk].

    Args:
        element_bytes: bytes per element of parameters whose map states no dtype.
    """
    stages = stage_layers(model.num_layers, grid.pp, split)
    chunks = [[ChunkParameters() for _ in stage] for stage in stages]
    chunk_of = {
        layer: chunks[stage][number]
        for stage, ranges in enumerate(stages)
        for number, layers in enumerate(ranges)
        for layer in layers
    }
    first, last = chunks[0][0], chunks[-1][-1]
    tied = model.tie_embeddings and model.head == "lm"
    for name, mapping in model.parameter_maps().items():
        shape = _local_shape(model, name, mapping, grid)
        num_elements = prod(shape)
        match name.split("."):
            case ["decoder", "layers", number, *_]:
                chunk = chunk_of[int(number)]
                if num_elements and _LINEAR.search(name):
                    chunk.linears.append(shape)
            case ["embedding", *_]:
                chunk = first
            case _:
                chunk = last
        if name.startswith("mtp.") or mapping.frozen:
            chunk.untrained_bytes += num_elements * (element_bytes if mapping.dtype is None else DTYPE_BYTES["float32"])
        elif mapping.expert is not None:
            chunk.experts += [num_elements] if num_elements else []
        elif mapping.dtype is not None and DTYPE_BYTES[mapping.dtype] != element_bytes:
            chunk.float32.append(num_elements)
        elif name in (EMBEDDING, HEAD) and tied:
            if grid.pp > 1:
                chunk.shared.append(num_elements)
            elif name == EMBEDDING:
                chunk.dense.append(num_elements)
        else:
            chunk.dense.append(num_elements)
    return chunks


def training_state(
    model: ModelArchitecture, grid: RankGrid, split: PipelineSplit, element: ElementBytes, *, distributed: bool
) -> list[StateBytes]:
    """Return the training state of a rank of each pipeline stage.

    With the distributed optimizer, the optimizer state is that of a rank whose part of the buffers holds no padding;
    others have a few kilobytes less.
    """
    states = []
    for chunks in chunk_parameters(model, grid, split, element.parameters):
        held = updated = 0  # elements on the rank, and those that its optimizer updates
        for chunk in chunks:
            for sizes, width in (
                (chunk.dense, grid.dp * grid.cp),
                (chunk.shared, grid.dp * grid.cp),
                (chunk.experts, grid.expert_dp),
            ):
                elements = bucket_elements(sizes, width) if distributed else sum(sizes)
                held += elements
                updated += elements // width if distributed else elements
        width, held_32 = grid.dp * grid.cp, sum(sum(chunk.float32) for chunk in chunks)
        if distributed:
            held_32 = sum(bucket_elements(chunk.float32, width) for chunk in chunks)
        float32_bytes = held_32 * DTYPE_BYTES["float32"]
        states.append(
            StateBytes(
                parameters=held * element.parameters + float32_bytes + sum(chunk.untrained_bytes for chunk in chunks),
                gradients=held * element.gradients + float32_bytes,
                main_parameters=updated * element.main_parameters,
                moments=(updated + (held_32 // width if distributed else held_32)) * element.moments,
            )
        )
    return states


def frozen_state(
    model: ModelArchitecture, grid: RankGrid, split: PipelineSplit, element: ElementBytes
) -> list[StateBytes]:
    """Return what a rank of each pipeline stage holds of a model that is not trained."""
    size = element.parameters
    return [
        StateBytes(
            parameters=sum(
                size * sum(chunk.dense + chunk.experts + chunk.shared)
                + DTYPE_BYTES["float32"] * sum(chunk.float32)
                + chunk.untrained_bytes
                for chunk in chunks
            )
        )
        for chunks in chunk_parameters(model, grid, split, size)
    ]


def library_caches(
    model: ModelArchitecture,
    grid: RankGrid,
    split: PipelineSplit,
    element: ElementBytes,
    *,
    head_kind: HeadKind,
    is_trained: bool,
) -> list[CacheBytes]:
    """Return what libraries keep on a rank of each pipeline stage."""
    is_tied = model.tie_embeddings and grid.pp == 1  # on one rank: autograd then gets the embedding's own gradient
    has_dummy = model.head == "lm" and (head_kind == "plain" or (head_kind == "fused" and not is_tied))
    head = (padded_vocab(model, grid.tp) // grid.tp, model.hidden_size)
    result = []
    for stage, chunks in enumerate(chunk_parameters(model, grid, split, element.parameters)):
        linears = [shape for chunk in chunks for shape in chunk.linears]
        dummies = {*linears, *([head] if has_dummy and stage == grid.pp - 1 else [])} if is_trained else set()
        result.append(
            CacheBytes(
                quantized=sum(map(prod, linears)) * (element.quantized if is_trained else element.quantized // 2),
                dummy_gradients=sum(map(prod, dummies)) * element.parameters,
            )
        )
    return result


def bucket_elements(sizes: Sequence[int], width: int) -> int:
    """Return the elements of a bucket of parameters of these sizes whose optimizer state `width` ranks share."""
    return _round_up(sum(_round_up(n, PARAMETER_MULTIPLE) for n in sizes), lcm(BUCKET_MULTIPLE, width))


def _local_shape(model: ModelArchitecture, name: str, mapping: ParameterMap, grid: RankGrid) -> tuple[int, ...]:
    """Return the shape of a rank's shard; (0,) of an expert of other expert-parallel ranks than the first."""
    if mapping.expert is not None:
        return local_shape(mapping, grid.expert_tp) if mapping.expert < model.num_experts // grid.ep else (0,)
    is_padded = name == EMBEDDING or (name == HEAD and model.head == "lm")
    return local_shape(mapping, grid.tp, rows=padded_vocab(model, grid.tp) if is_padded else None)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
