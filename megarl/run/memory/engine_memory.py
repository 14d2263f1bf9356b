"""Bytes that a tensor-parallel rank of an SGLang engine takes: weights, KV cache, CUDA graphs, working memory.

SGLang allocates weights and KV cache up to a fraction of the memory that is free before it loads weights
(`mem_fraction_static`); the rest is left for the activations of prefills and for CUDA graphs. The reserves below are
those of its `arg_groups/memory_hook.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megarl.config.rollout import RolloutConfig
from megarl.megatron.families.architecture import EMBEDDING, HEAD, ModelArchitecture
from megarl.megatron.families.attention import Attention, GroupedQueryAttention, LatentAttention
from megarl.megatron.families.parameter_map import local_shape
from megarl.model_files.json_object import JsonMapping
from megarl.model_files.quantization import BLOCK, is_quantized
from megarl.run.memory.gpus import GIB, MIB

PREFILL_MIB_PER_TOKEN = 1.5
"""Working memory per token of a prefill chunk."""

WHOLE_PREFILL_TOKENS = 16_384
"""Tokens of a prefill batch where prefills are not chunked (`max_prefill_tokens`)."""

GRAPH_MIB_PER_SEQUENCE = 2
"""CUDA graphs per sequence of the largest decode batch."""

PREFILL_GRAPHS_MIB, LATENT_PREFILL_GRAPHS_MIB = 512, 1536
"""CUDA graphs of prefills: 8 MiB for each of some 60 lengths; with latent attention 1.5 GiB."""


NOT_QUANTIZED: JsonMapping = {}
"""Content of a config.json without quantized weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBytes:
    """Memory of one tensor-parallel rank of an engine."""

    weights: int
    kv_per_token: int
    graphs: int
    """CUDA graphs, which stay when weights and KV cache are released."""
    working: int
    """Activations and metadata while the engine generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """Numbers of ranks of an engine that split each kind of weights."""

    experts: int
    """All ranks, whether each has some experts or a part of all."""
    attention: int
    """Ranks of a group of data-parallel attention, which also split the embedding."""
    head: int
    """Ranks that split the output head."""
    dense: int
    """Ranks that split the MLPs of layers without experts."""
    shared: int
    """Ranks that split the shared experts."""

    @classmethod
    def of(cls, rollout: RolloutConfig) -> EngineSizes:
        """Return the sizes for the options of an engine."""
        extra, tp = rollout.engine.extra_args, rollout.tp
        attention = tp // rollout.engine.attn_dp_size
        return cls(
            experts=tp,
            attention=attention,
            head=attention if extra.get("enable_dp_lm_head") else tp,
            dense=extra.get("moe_dense_tp_size") or tp,
            shared=1 if extra.get("moe_a2a_backend") == "deepep" else tp,
        )

    @classmethod
    def all(cls, tp: int) -> EngineSizes:
        """Return the sizes of an engine all of whose ranks split all weights."""
        return cls(experts=tp, attention=tp, head=tp, dense=tp, shared=tp)

    def of_parameter(self, name: str, *, is_expert: bool) -> int:
        """Return the number of ranks that split a parameter with this megatron-core name."""
        if is_expert:
            return self.experts
        if name == HEAD:
            return self.head
        if name == EMBEDDING or ".self_attention." in name:
            return self.attention
        return self.shared if ".shared_experts." in name else self.dense


def engine_bytes(
    model: ModelArchitecture,
    rollout: RolloutConfig,
    element_bytes: int,
    gpu_bytes: int,
    hf_config: JsonMapping = NOT_QUANTIZED,
) -> EngineBytes:
    """Return the memory of an engine rank on a GPU with `gpu_bytes`.

    Args:
        element_bytes: bytes per element of the weights that are not FP8, and of the KV cache unless it is FP8.
        hf_config: content of the model's config.json, which says whether weights are FP8.
    """
    extra, is_latent = rollout.engine.extra_args, bool(model.attentions(LatentAttention))
    kv_element_bytes = 1 if str(extra.get("kv_cache_dtype", "auto")).startswith("fp8") else element_bytes
    is_small = gpu_bytes < 60 * GIB
    chunk = extra.get("chunked_prefill_size") or (4096 if is_small else 8192 if gpu_bytes < 160 * GIB else 16384)
    chunk = chunk if chunk > 0 else WHOLE_PREFILL_TOKENS
    default_batch = (32 if is_small else 256) if rollout.tp < 4 else (160 if is_small else 512)
    largest_batch = extra.get("cuda_graph_max_bs_decode") or default_batch
    batch = min(largest_batch, rollout.engine.max_running_requests or largest_batch)
    graphs = GRAPH_MIB_PER_SEQUENCE * batch + (LATENT_PREFILL_GRAPHS_MIB if is_latent else PREFILL_GRAPHS_MIB)
    working = 512 + PREFILL_MIB_PER_TOKEN * max(chunk, 2048) + 1024 * rollout.tp / 8
    sizes = EngineSizes.of(rollout)
    return EngineBytes(
        weights=engine_weights(model, sizes, element_bytes, hf_config),
        kv_per_token=kv_bytes_per_token(model, sizes.attention, kv_element_bytes),
        graphs=0 if extra.get("disable_cuda_graph") else graphs * MIB,
        working=int(working * MIB),
    )


def engine_weights(
    model: ModelArchitecture, sizes: EngineSizes, element_bytes: int, hf_config: JsonMapping = NOT_QUANTIZED
) -> int:
    """Return the bytes of an engine rank's weights, without MTP layers.

    Key-value heads are replicated if more ranks split the attention than there are heads.

    Experts are split over the ranks by tensor or by expert, which takes equally many bytes. Arguments: see
    `engine_bytes`.
    """
    total = 0
    for name, mapping in model.parameter_maps().items():
        if name.startswith("mtp.") or (name == HEAD and model.tie_embeddings):
            continue
        rows, tp = None, sizes.of_parameter(name, is_expert=mapping.expert is not None)
        if name == EMBEDDING or (name == HEAD and model.head == "lm"):
            rows = -(-model.vocab_size // tp) * tp
        if mapping.shard_dim == 0 and "linear_qkv" in name:
            number = int(name.removeprefix("decoder.layers.").split(".")[0])
            elements = _qkv_elements(model.layers[number].attention, tp, is_bias=name.endswith("bias"))
        else:
            elements = _split(local_shape(mapping, 1, rows=rows), mapping.shard_dim, tp)
        if is_quantized(mapping.parts[0][0].tensor, hf_config):
            total += elements + 4 * -(-elements // BLOCK**2)
        else:
            total += elements * (element_bytes if mapping.dtype is None else 4)
    return total


def kv_bytes_per_token(model: ModelArchitecture, tp: int, element_bytes: int) -> int:
    """Return the bytes of KV cache per token and engine rank.

    A latent is not divided by tp: every rank stores it. Key-value heads are replicated where tp exceeds them. The key
    of an indexer is stored in FP8, with a float32 scale for each block.
    """
    width = indexed = 0
    for layer in model.layers:
        match layer.attention:
            case LatentAttention() as latent:
                width += latent.kv_lora_rank + latent.qk_rope_head_dim
                if latent.indexer:
                    indexed += latent.indexer.head_dim + 4 * (latent.indexer.head_dim // BLOCK)
            case GroupedQueryAttention() as grouped:
                width += 2 * grouped.head_dim * max(1, grouped.num_kv_heads // tp)
    return width * element_bytes + indexed


def default_mem_fraction(engine: EngineBytes, gpu_bytes: int) -> float:
    """Return the fraction that SGLang chooses by itself: all but its reserve, of at least 10 GiB on large GPUs."""
    reserved = engine.working + engine.graphs
    if gpu_bytes > 60 * GIB:
        reserved = max(reserved, 10 * GIB)
    return round((gpu_bytes - reserved) / gpu_bytes, 3)


def _qkv_elements(attention: Attention, tp: int, *, is_bias: bool) -> int:
    assert isinstance(attention, GroupedQueryAttention)
    queries = attention.num_heads // tp * (2 if attention.output_gate else 1)
    rows = (queries + 2 * max(1, attention.num_kv_heads // tp)) * attention.head_dim
    return rows * (1 if is_bias else attention.hidden_size)


def _split(shape: tuple[int, ...], dim: int | None, ranks: int) -> int:
    if dim is None:
        return prod(shape)
    return prod(shape) // shape[dim] * (shape[dim] // ranks)
