"""What the processes on one GPU need: the models that a trainer process holds, and an engine rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.placement import MAIN_POOL
from megarl.config.run import DpoConfig, RunConfig, StageConfig
from megarl.config.trainer import OffloadConfig, OptimizerConfig, ParallelConfig
from megarl.megatron.families.architecture import Head, ModelArchitecture
from megarl.megatron.families.load_architecture import load_architecture_and_dtype, model_head
from megarl.megatron.families.trainer_layouts import pipeline_split
from megarl.model_files.json_object import JsonMapping
from megarl.model_files.model_config import read_model_config
from megarl.run.memory.activations import ActivationBytes, HeadKind, TokenLoad, stage_activations
from megarl.run.memory.engine_memory import EngineBytes, engine_bytes
from megarl.run.memory.gpus import NCCL_BYTES_PER_GROUP
from megarl.run.memory.training_memory import (
    CacheBytes,
    ElementBytes,
    StateBytes,
    frozen_state,
    library_caches,
    training_state,
)

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
