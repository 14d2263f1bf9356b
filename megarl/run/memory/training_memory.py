"""Bytes of a trainer rank by formula: activations, and parameters, gradients and optimizer state.

Activations that the backward pass needs, of Transformer Engine's layers. Attention is fused: no score matrix is stored
(Korthikanti et al., arXiv 2205.05198, without its terms of scores and of dropout).

Bytes per token of a rank in bfloat16, with hidden size h, a heads of size d, g key-value heads, an MLP of width f,
t = tp, x = etp, and u = 1/t with sequence parallelism, else 1:

    layer_input       4h u: residual stream before both norms
    layernorm         4h u: outputs of both norms
    attention         2(a + 2g)d/t queries, keys, values; 2(a + g)d/t with RoPE; 2ad/t output. Latent: latents, output
    core_attn         4a/t: log-sum-exp of the softmax. Gated delta net: a float32 state for every 64 tokens
    mla_up_proj       queries, keys and values of all heads, projected from latents
    mlp               4f/t gate and up; 2f/t their product
    moe               of each token received: 2h input; 4f/x gate and up; 2h output. Router: logits and indices
    moe_act           2f/x of each token received
    shared_experts    as mlp
    routes            k, or 2k with more than 256 experts, where routes are replayed; recomputation keeps them

CPUs keep more, since megarl's torch layers fuse nothing.

Training state, as megatron-core allocates it. Per parameter, in bfloat16 with gradients and optimizer state in float32
(s: ranks that share the optimizer state):

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm, prod
from typing import Literal

import numpy as np

from megarl.batch.trajectory import route_dtype
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.megatron import MegatronConfig
from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.megatron.families.architecture import EMBEDDING, HEAD, ModelArchitecture
from megarl.megatron.families.attention import GatedDeltaNet, GroupedQueryAttention, LatentAttention
from megarl.megatron.families.feed_forward import GatedMlp, MixtureOfExperts
from megarl.megatron.families.parameter_map import ParameterMap, local_shape
from megarl.megatron.families.trainer_layouts import PipelineSplit, padded_vocab, pipeline_split, stage_layers

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

FLOAT32_BYTES = DTYPE_BYTES["float32"]

EXPERT_IMBALANCE = 1.5
"""Tokens that the most loaded expert-parallel rank receives, relative to the mean. An assumption: it depends on the
router and the data, and has no upper bound below the number of ranks."""

DELTA_NET_CHUNK = 64
"""Tokens between two states that the kernels of a gated delta net keep for the backward pass."""

HeadKind = Literal["fused", "plain", "float32"]
"""How the language head computes logits: in chunks of columns; all in the dtype of the weight; all in float32."""

HEAD_CHUNKS, HEAD_CHUNK_BYTES, HEAD_COLUMN_MULTIPLE = 16, 2**28, 256
"""The constants of `megarl_kernels.linear_logprob`, which imports torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoad:
    """A micro-batch on one rank."""

    tokens: int
    """Tokens of the rank: those of the micro-batch divided by cp."""
    element_bytes: int
    """Bytes per element of activations: 2 in bfloat16."""
    longest_sequence: int = 0
    """Tokens of its longest sequence, on all context-parallel ranks."""
    has_routes: bool = False
    """The routers take experts that an earlier pass or the engine has chosen (`trainer.moe.router_replay`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Bytes on one rank beyond its training state."""

    stored: int
    """Activations of all micro-batches in flight, kept for the backward pass."""
    recomputed: int
    """Of one layer, or block of layers, while the backward pass recomputes it."""
    head: int
    """Of the output layer, on the last pipeline stage, forward and backward."""
    forward: int
    """Largest layer of a forward pass without backward pass, or its output layer."""


def layer_activations(
    model: ModelArchitecture, number: int, parallel: ParallelConfig, load: TokenLoad
) -> dict[str, int]:
    """Return the bytes stored for the backward pass of layer `number` and one micro-batch, by part of the layer."""
    t, size, n = parallel.tp, load.element_bytes, load.tokens
    shared = t if parallel.uses_sequence_parallel else 1
    hidden = size * n * model.hidden_size
    parts = {"layer_input": 2 * hidden // shared, "layernorm": 2 * hidden // shared}
    layer = model.layer(number)
    match layer.attention:
        case GroupedQueryAttention() as a:
            query, key = a.num_heads * a.head_dim, max(a.num_kv_heads, t) * a.head_dim
            parts["attention"] = size * n * (query + 2 * key + query + key + query) // t
            parts["core_attn"] = FLOAT32_BYTES * n * a.num_heads // t
        case LatentAttention() as a:
            key, value = a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim
            latents = 2 * ((a.q_lora_rank or 0) + a.kv_lora_rank) + a.qk_rope_head_dim
            parts["attention"] = size * n * (latents + a.num_heads * value // t)
            parts["core_attn"] = FLOAT32_BYTES * n * a.num_heads // t
            if a.indexer and load.longest_sequence > a.indexer.top_k:
                parts["core_attn"] += size * n * load.longest_sequence  # the mask of the keys that are not selected
            # queries, keys, and the projection that keys and values come from
            parts["mla_up_proj"] = size * n * a.num_heads * (2 * key + a.qk_nope_head_dim + value) // t
        case GatedDeltaNet() as a:
            keys, values = a.num_key_heads * a.key_head_dim, a.num_value_heads * a.value_head_dim
            projected = 2 * (keys + values + a.num_value_heads)
            expanded = 2 * a.num_value_heads * a.key_head_dim  # queries and keys, repeated for each value head
            parts["attention"] = size * n * (projected + 2 * keys + values + expanded + 2 * values) // t
            state = a.num_value_heads * a.key_head_dim * a.value_head_dim
            parts["core_attn"] = FLOAT32_BYTES * -(-n // DELTA_NET_CHUNK) * state // t
    match layer.mlp:
        case MixtureOfExperts() as experts:
            return parts | _expert_activations(experts, parallel, load)
        case GatedMlp() as mlp:
            return parts | {"mlp": size * n * 3 * mlp.ffn_size // t}


def _expert_activations(experts: MixtureOfExperts, parallel: ParallelConfig, load: TokenLoad) -> dict[str, int]:
    own = load.tokens // (parallel.tp if parallel.uses_sequence_parallel else 1)
    k, x = experts.routing.top_k, parallel.expert_tp
    imbalance = EXPERT_IMBALANCE if parallel.ep > 1 else 1.0
    received = int(own * k * x * imbalance)  # the ranks that split an expert gather its tokens
    width, hidden = experts.ffn_size // x, experts.hidden_size
    router = own * (FLOAT32_BYTES * experts.num_experts + 8 * k)  # logits, and 8 bytes of indices per choice
    parts = {
        "moe": load.element_bytes * received * (2 * hidden + 2 * width) + router,
        "moe_act": load.element_bytes * received * width,
    }
    if load.has_routes:
        parts["routes"] = own * k * np.dtype(route_dtype(experts.num_experts)).itemsize
    if experts.shared_ffn_size:
        parts["shared_experts"] = load.element_bytes * load.tokens * 3 * experts.shared_ffn_size // parallel.tp
    return parts


def stage_activations(
    model: ModelArchitecture,
    parallel: ParallelConfig,
    recompute: RecomputeConfig,
    load: TokenLoad,
    *,
    head_kind: HeadKind = "fused",
) -> list[ActivationBytes]:
    """Return the activations of a rank of each pipeline stage."""
    first = {layer: number for number, layer in reversed(list(enumerate(model.layers)))}
    by_kind = {layer: layer_activations(model, number, parallel, load) for layer, number in first.items()}
    result = []
    stages = stage_layers(model.num_layers, parallel.pp, pipeline_split(parallel))
    for stage, chunks in enumerate(stages):
        layers = [[by_kind[model.layers[i]] for i in chunk] for chunk in chunks]
        kept = max(_kept(chunk, recompute) for chunk in layers)
        flat = [parts for chunk in layers for parts in chunk]
        forward = max(sum(parts.values()) for parts in flat)
        is_last = stage == parallel.pp - 1
        head, head_forward = (
            head_bytes(model, parallel.tp, load, head_kind, trains=trains) if is_last else 0 for trains in (True, False)
        )
        result.append(
            ActivationBytes(
                stored=kept * chunks_in_flight(parallel, stage),
                recomputed=_recomputed(flat, recompute),
                head=head,
                forward=max(forward, head_forward),
            )
        )
    return result


def chunks_in_flight(parallel: ParallelConfig, stage: int) -> int:
    """Return the most micro-batches times model chunks whose activations a stage stores, if there are enough.

    1F1B: pp - stage. Interleaved: megatron-core's warm-up, 2 (pp - stage - 1) + (vpp - 1) pp, and one more.
    """
    pp, vpp = parallel.pp, parallel.vpp
    return pp - stage if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp + 1


def head_bytes(model: ModelArchitecture, tp: int, load: TokenLoad, kind: HeadKind, *, trains: bool) -> int:
    """Return the peak of the output layer: input and output of the final norm, and of a language head the logits."""
    norms = 2 * load.element_bytes * load.tokens * model.hidden_size
    if model.head == "value":
        return norms
    return norms + logits_bytes(load, padded_vocab(model, tp) // tp, model.hidden_size, kind, trains=trains)


def logits_bytes(load: TokenLoad, num_columns: int, hidden_size: int, kind: HeadKind, *, trains: bool) -> int:
    """Return the peak of a language head, without the weight's dummy gradient, which stays.

    With t tokens, v columns of the vocabulary on the rank, c of them in a chunk, hidden size h, elements of e bytes:

                 forward                                    backward, besides
        fused    4 tc: logits of a chunk                    e tc: their gradient; (4 + e) th: that of hidden states
        plain    e tv: logits, later their gradient         e th: gradient of hidden states
        float32  4 tv: the same; 4 th + 4 vh: hidden        4 th: gradient of hidden states; 4 vh: that of the weight,
                 states and weight in float32               which is rounded afterwards

    A fused head keeps the logits of all chunks for its backward pass where these fit half of the memory that is free
    then, which is not planned.
    """
    e, t, v, h = load.element_bytes, load.tokens, num_columns, hidden_size
    match kind:
        case "fused":
            c = min(v, head_chunk_columns(t, v, FLOAT32_BYTES + e))
            return FLOAT32_BYTES * t * c + (e * t * c + (FLOAT32_BYTES + e) * t * h if trains else 0)
        case "plain":
            return e * t * v + (e * t * h if trains else 0)
        case "float32":
            return FLOAT32_BYTES * (t * v + (t + v) * h * (2 if trains else 1))


def head_chunk_columns(num_tokens: int, num_columns: int, bytes_per_logit: int) -> int:
    """Return the columns of a chunk of a fused head, as `megarl_kernels.linear_logprob.chunk_columns`."""
    columns = max(-(-num_columns // HEAD_CHUNKS), HEAD_CHUNK_BYTES // (bytes_per_logit * num_tokens))
    return -(-columns // HEAD_COLUMN_MULTIPLE) * HEAD_COLUMN_MULTIPLE


def _kept(layers: Sequence[Mapping[str, int]], recompute: RecomputeConfig) -> int:
    match recompute.granularity:
        case "full":
            block = layers[0]["layer_input"] // 2  # the input of the block, of the two that a layer has
            if recompute.method == "uniform":
                recomputed, num_blocks = layers, -(-len(layers) // recompute.layers)
            else:
                recomputed = layers[: recompute.layers]
                num_blocks = len(recomputed)
            rest = layers[len(recomputed) :]
            routes = sum(parts.get("routes", 0) for parts in recomputed)
            return block * num_blocks + routes + sum(sum(parts.values()) for parts in rest)
        case "selective":
            dropped = _dropped_parts(recompute)
            return sum(size for parts in layers for part, size in parts.items() if part not in dropped)
        case "none":
            return sum(sum(parts.values()) for parts in layers)


def _dropped_parts(recompute: RecomputeConfig) -> set[str]:
    """Return the parts that `selective` recomputes: `moe` is the layer of experts with all that is in it."""
    return {*recompute.modules, *(("moe_act", "shared_experts") if "moe" in recompute.modules else ())}


def _recomputed(layers: Sequence[Mapping[str, int]], recompute: RecomputeConfig) -> int:
    match recompute.granularity:
        case "full":
            layers_at_once = recompute.layers if recompute.method == "uniform" else 1
            return layers_at_once * max(sum(parts.values()) for parts in layers)
        case "selective":
            return max(sum(parts.get(part, 0) for part in _dropped_parts(recompute)) for parts in layers)
        case "none":
            return 0


PARAMETER_MULTIPLE, BUCKET_MULTIPLE = 64, 128
"""With the distributed optimizer, parameters start at multiples of so many elements of megatron-core's buffers, and
buckets end at multiples (`_ParamAndGradBuffer`)."""

_LINEAR = re.compile(r"\.(linear_\w+|in_proj|out_proj)\.weight\d*$")


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
            gradients=FLOAT32_BYTES if megatron.ddp.get("grad_reduce_in_fp32", True) else size,
            main_parameters=0 if is_on_host or dtype == "float32" else FLOAT32_BYTES,
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
            chunk.untrained_bytes += num_elements * (element_bytes if mapping.dtype is None else FLOAT32_BYTES)
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
        float32_bytes = held_32 * FLOAT32_BYTES
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
                + FLOAT32_BYTES * sum(chunk.float32)
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
