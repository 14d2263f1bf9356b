"""What the processes on one GPU need: the models that a trainer process holds, and an engine rank.

SGLang allocates weights and KV cache up to a fraction of the memory that is free before it loads weights
(`mem_fraction_static`); the rest is left for the activations of prefills and for CUDA graphs. The reserves below are
those of its `arg_groups/memory_hook.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from megarl.cluster.placement.hardware import GPU_TYPES, GpuType
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.placement import MAIN_POOL
from megarl.config.rollout import RolloutConfig
from megarl.config.run import DpoConfig, RunConfig, StageConfig
from megarl.config.trainer import OffloadConfig, OptimizerConfig, ParallelConfig
from megarl.errors import ConfigError
from megarl.megatron.families.architecture import EMBEDDING, HEAD, Head, ModelArchitecture
from megarl.megatron.families.attention import Attention, GroupedQueryAttention, LatentAttention
from megarl.megatron.families.load_architecture import load_architecture_and_dtype, model_head
from megarl.megatron.families.parameter_map import local_shape
from megarl.megatron.families.trainer_layouts import pipeline_split
from megarl.model_files.json_object import JsonMapping
from megarl.model_files.model_config import read_model_config
from megarl.model_files.quantization import BLOCK, is_quantized
from megarl.run.memory.training_memory import (
    ActivationBytes,
    CacheBytes,
    ElementBytes,
    HeadKind,
    StateBytes,
    TokenLoad,
    frozen_state,
    library_caches,
    stage_activations,
    training_state,
)

MIB, GIB = 2**20, 2**30

USABLE_FRACTION = 0.95
"""Part of a GPU's memory that is planned with. The rest is lost to fragmentation of torch's caching allocators."""

CUDA_CONTEXT_BYTES = 512 * MIB
"""CUDA context and loaded kernels of one process: 0.4 to 0.6 GB, of which AIConfigurator measured 551 MB."""

NCCL_BYTES_PER_GROUP = 656 * MIB
"""Buffers of one NCCL communicator of more than two GPUs, which allocates them with its first collective: 688 MB
(https://github.com/NVIDIA/nccl/issues/964). Smaller where NCCL_BUFFSIZE or NVLink SHARP say so."""


def gpu_type(name: str) -> GpuType:
    """Return the type of GPU `name`, such as `h100-80`.

    Raises:
        ConfigError: the name is unknown.
    """
    named = {gpu.name: gpu for gpu in GPU_TYPES if gpu.name}
    if name not in named:
        raise ConfigError(f"--gpu: needs one of {', '.join(sorted(named))}, got {name}")
    return named[name]


def gpu_memory(name: str) -> int:
    """Return the bytes of memory of GPU `name`.

    Raises:
        ConfigError: as `gpu_type`.
    """
    return gpu_type(name).mebibytes * MIB


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


POLICY = "policy"


NO_CACHES = CacheBytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    """One model on one GPU."""

    name: str
    state: StateBytes
    activations: ActivationBytes
    is_trained: bool
    caches: CacheBytes = NO_CACHES
    offload_when_idle: bool = False
    """Everything is on the host between its forward passes and updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDemand:
    """The processes on one GPU of a pool: at most one trainer process, and at most one engine rank."""

    pool: str
    rank: int
    """Index of the GPU in its pool."""
    models: tuple[ModelDemand, ...] = ()
    """Models of the trainer process; the policy is the first, where the pool is the trainer's."""
    offload: OffloadConfig
    """What the policy offloads while engines generate (resolved)."""
    nccl_bytes: int = 0
    """NCCL buffers of the trainer process."""
    engine: EngineBytes | None = None
    engine_nccl_bytes: int = 0
    releases_engine_memory: bool = False
    bucket_bytes: int = 0
    """Buckets of a weight sync on this GPU, whichever process owns them."""
    scores_with_policy: bool = False
    """The policy makes a forward pass before it is trained."""


def gpu_demands(config: StageConfig, gpu_bytes: int) -> list[GpuDemand]:
    """Return the demand of GPUs of each pool, one for each combination of pipeline stages of the pool's models.

    Every GPU of a pool with engines is taken to have an engine rank. The model folders need to have passed the checks.

    Args:
        gpu_bytes: memory of a GPU, which SGLang chooses its batch sizes by.
    """
    shared = isinstance(config, RunConfig) and not config.disaggregated
    demands = []
    for name, pool in config.placement.all_pools.items():
        models = [*_models_of(config, name)]
        trainer = GpuDemand(
            pool=name,
            rank=0,
            offload=config.trainer.offload.resolved("cuda", shared=shared),
            nccl_bytes=_nccl_bytes(models[0][0]) if models else 0,
        )
        if isinstance(config, RunConfig):
            trainer = _with_engine(trainer, config, gpu_bytes)
        seen = set()
        for rank in range(pool.slots):
            stages = tuple(grid.coordinates(rank).pp for grid, _ in models)
            if stages not in seen:
                seen.add(stages)
                here = tuple(by_stage[stage] for stage, (_, by_stage) in zip(stages, models, strict=True))
                demands.append(replace(trainer, rank=rank, models=here))
    return demands


def _with_engine(demand: GpuDemand, config: RunConfig, gpu_bytes: int) -> GpuDemand:
    """Return the demand with an engine rank, if the pool has engines, and with the buckets of a weight sync."""
    engines = config.placement.rollout.pool
    if demand.pool not in (MAIN_POOL, engines):
        return demand
    demand = replace(
        demand,
        bucket_bytes=_bucket_bytes(config),
        scores_with_policy=demand.pool == MAIN_POOL and config.algorithm.kl_reward is not None,
    )
    if demand.pool != engines:
        return demand
    model = _architecture(config, config.model.path, "lm")
    return replace(
        demand,
        engine=engine_bytes(model, config.rollout, _element(config).parameters, gpu_bytes, _hf_config(config)),
        engine_nccl_bytes=NCCL_BYTES_PER_GROUP if config.rollout.tp > 1 else 0,
        releases_engine_memory=config.releases_engine_memory("cuda"),
    )


def longest_sequence(config: StageConfig) -> int:
    """Return the most tokens of a trajectory, as far as the configuration limits it; 0 if it does not."""
    if not isinstance(config, RunConfig):
        return 0
    return config.rollout.max_new_tokens + (config.data.max_prompt_tokens or 0)


_Stages = list[ModelDemand]


def _models_of(config: StageConfig, pool: str) -> Iterator[tuple[RankGrid, _Stages]]:
    """Yield grid and demand by pipeline stage of each model whose ranks are on the slots of `pool`."""
    placement = config.placement
    slots = placement.all_pools[pool].slots
    swaps = placement.offload_idle_models is not False
    if pool == MAIN_POOL:
        model = _architecture(config, config.model.path, model_head(config))
        yield _model_demand(config, POLICY, model, config.trainer.parallel, slots, config.trainer.optimizer)
        if isinstance(config, DpoConfig) and config.dpo.reference.path is not None:
            reference = _architecture(config, config.dpo.reference.path, "lm")
            parallel = config.dpo.reference.parallel or config.trainer.parallel
            yield _model_demand(config, "reference", reference, parallel, slots, None, swaps=swaps)
    for auxiliary in config.auxiliary_models:
        if auxiliary.pool == pool:
            model = _architecture(config, auxiliary.path, auxiliary.head)
            parallel, own = auxiliary.parallel, swaps and pool == MAIN_POOL
            name, key, optimizer = auxiliary.name, auxiliary.key, auxiliary.optimizer
            yield _model_demand(config, name, model, parallel, slots, optimizer, key=key, swaps=own)


def _model_demand(
    config: StageConfig,
    name: str,
    model: ModelArchitecture,
    parallel: ParallelConfig,
    slots: int,
    optimizer: OptimizerConfig | None,
    *,
    key: str = "trainer",
    swaps: bool = False,
) -> tuple[RankGrid, _Stages]:
    """Return grid and demand by pipeline stage.

    Args:
        optimizer: None if the model is not trained.
        key: YAML key of the section that has the optimizer.
    """
    grid, split = RankGrid.of(parallel, slots), pipeline_split(parallel)
    element = _element(config)
    if optimizer is not None and not optimizer.is_adam:
        from megarl.megatron.training.optimizer_class import load_optimizer  # imports torch

        other = load_optimizer(optimizer, config.trainer.megatron, parallel, key=f"{key}.optimizer")
        element = replace(element, moments=other.state_bytes)
    states = (
        training_state(model, grid, split, element, distributed=optimizer.distributed)
        if optimizer is not None
        else frozen_state(model, grid, split, element)
    )
    longest = longest_sequence(config)
    tokens = max(config.trainer.max_tokens_per_micro_batch, longest)
    load = TokenLoad(
        tokens=-(-tokens // parallel.cp),
        element_bytes=element.parameters,
        longest_sequence=longest,
        has_routes=name == POLICY and config.trainer.moe.router_replay != "none",
    )
    kind, is_trained = _head_kind(config), optimizer is not None
    activations = stage_activations(model, parallel, config.trainer.recompute, load, head_kind=kind)
    caches = library_caches(model, grid, split, element, head_kind=kind, is_trained=is_trained)
    return grid, [
        ModelDemand(
            name=name, state=state, activations=use, is_trained=is_trained, caches=kept, offload_when_idle=swaps
        )
        for state, use, kept in zip(states, activations, caches, strict=True)
    ]


def _element(config: StageConfig) -> ElementBytes:
    return ElementBytes.of("float32" if config.model.dtype == "float32" else "bfloat16", config.trainer.megatron)


def _head_kind(config: StageConfig) -> HeadKind:
    if config.trainer.fused_lm_head is not False:  # true on CUDA by default
        return "fused"
    return "float32" if config.model.fp32_lm_head and config.model.dtype != "float32" else "plain"


def _architecture(config: StageConfig, path: str, head: Head) -> ModelArchitecture:
    return load_architecture_and_dtype(path, head=head, family=config.model.family)[0]


def _hf_config(config: StageConfig) -> JsonMapping:
    return read_model_config(config.model.path)


def _nccl_bytes(grid: RankGrid) -> int:
    experts = grid.expert_tp * grid.ep if grid.ep > 1 else 1
    sizes = (grid.tp, grid.pp, grid.cp, grid.dp * grid.cp, experts)
    return NCCL_BYTES_PER_GROUP * sum(size > 1 for size in sizes)


def _bucket_bytes(config: RunConfig) -> int:
    """Return the bytes of a rank's buckets: two; of `gather_hf` also what they are packed from, of full tensors."""
    size = config.weight_sync.bucket_bytes
    if config.weight_sync.strategy != "gather_hf":
        return 2 * size
    model = _architecture(config, config.model.path, "lm")
    largest = model.vocab_size * model.hidden_size * _element(config).parameters
    return 3 * max(size, largest)
