"""Bytes of activations that the backward pass of a rank needs, by formula for Transformer Engine's layers.

Attention is fused: no score matrix is stored (Korthikanti et al., arXiv 2205.05198, without its terms of scores and of
dropout). Bytes per token of a rank in bfloat16, with hidden size h, a heads of size d, g key-value heads, an MLP of
width f, t = tp, x = etp, and u = 1/t with sequence parallelism, else 1:

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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megarl.batch.routes import route_dtype
from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import GatedDeltaNet, GroupedQueryAttention, LatentAttention
from megarl.megatron.families.feed_forward import GatedMlp, MixtureOfExperts
from megarl.megatron.families.trainer_layouts import padded_vocab, pipeline_split, stage_layers

FLOAT32_BYTES = 4

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
