"""The part of a GPU's free memory that an engine fills with weights and KV cache: SGLang's `mem_fraction_static`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.config.run import RunConfig
from megarl.engines.engine import KV_CACHE, WEIGHTS
from megarl.errors import ConfigError
from megarl.run.memory.engine_memory import default_mem_fraction
from megarl.run.memory.gpu_demand import GpuDemand, gpu_demands
from megarl.run.memory.gpus import GIB, MIB, USABLE_FRACTION
from megarl.run.memory.step_ledger import ENGINE, StepSimulation, peak, step_ledger


def engine_mem_fraction(config: RunConfig, gpu_bytes: int) -> EngineFraction:
    """Return the fraction of engines that share GPUs of `gpu_bytes` with the trainer.

    Raises:
        ConfigError: no memory is left for the KV cache; has the arithmetic.
    """
    demands = gpu_demands(config, gpu_bytes)
    fraction = choose_mem_fraction(config, demands, gpu_bytes)
    if fraction.value == 0:
        raise ConfigError(_why_nothing_is_left(demands, gpu_bytes))
    return fraction


def _why_nothing_is_left(demands: Sequence[GpuDemand], gpu_bytes: int) -> str:
    """Return the sentence that adds up the largest phase of the GPU with the highest peak, without a KV cache."""
    demand = max((d for d in demands if d.engine is not None), key=lambda d: peak(step_ledger(d, 0)))
    phase, holdings = max(step_ledger(demand, 0).peaks.items(), key=lambda item: item[1].total)
    return (
        f"rollout.engine.mem_fraction: no memory is left for the KV cache on GPU {demand.rank} of pool {demand.pool}: "
        f"{phase} needs {holdings.arithmetic()} of {USABLE_FRACTION:g} * {gpu_bytes / GIB:.1f} = "
        f"{USABLE_FRACTION * gpu_bytes / GIB:.1f} GiB; `megarl check --gpu` prints all phases, and a fraction in the "
        "configuration overrules this estimate"
    )


def free_at_engine_start(demand: GpuDemand, gpu_bytes: int) -> int:
    """Return the bytes that are free before an engine loads weights, of which `mem_fraction_static` is a fraction.

    The trainer has been built by then and has offloaded.
    """
    held = StepSimulation(demand, 0).ledger.now.by_account
    own = {(ENGINE, owner) for owner in (WEIGHTS, KV_CACHE, "CUDA graphs")}
    return gpu_bytes - sum(num_bytes for account, num_bytes in held.items() if account not in own)


def largest_kv_cache(demand: GpuDemand, gpu_bytes: int) -> int:
    """Return the size of the largest KV cache with which all phases fit the usable memory, in whole MiB; may be < 0."""
    usable = int(gpu_bytes * USABLE_FRACTION)
    if peak(step_ledger(demand, 0)) > usable:
        return usable - peak(step_ledger(demand, 0))
    low, high = 0, usable // MIB
    while low < high:
        middle = (low + high + 1) // 2
        if peak(step_ledger(demand, middle * MIB)) <= usable:
            low = middle
        else:
            high = middle - 1
    return low * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFraction:
    """The part of the free memory that engines fill with weights and KV cache."""

    value: float
    origin: str
    """Where it comes from, in words."""
    max_tokens: int | None = None
    """Limit of the KV cache in tokens (`rollout.engine.max_total_tokens`)."""


def choose_mem_fraction(config: RunConfig, demands: Sequence[GpuDemand], gpu_bytes: int) -> EngineFraction:
    """Return the fraction of a run's engines: that of the configuration, or one with which all phases fit all GPUs.

    Engines with GPUs of their own get SGLang's default. The fraction is 0 if nothing fits.
    """
    limit, chosen = config.rollout.engine.max_total_tokens, config.rollout.engine.mem_fraction
    with_engine = [demand for demand in demands if demand.engine is not None]
    if chosen is not None:
        return EngineFraction(value=chosen, origin="rollout.engine.mem_fraction", max_tokens=limit)
    if config.disaggregated:
        value = min(default_mem_fraction(d.engine, gpu_bytes) for d in with_engine if d.engine is not None)
        return EngineFraction(value=value, origin="SGLang's default mem_fraction", max_tokens=limit)
    value = min(largest_mem_fraction(demand, gpu_bytes) for demand in with_engine)
    return EngineFraction(value=value, origin="largest mem_fraction that fits all phases", max_tokens=limit)


def kv_cache_bytes(demand: GpuDemand, fraction: EngineFraction, gpu_bytes: int) -> int:
    """Return the size of the KV cache that SGLang allocates; 0 or less if the weights fill the fraction."""
    assert demand.engine is not None
    left = int(fraction.value * free_at_engine_start(demand, gpu_bytes)) - demand.engine.weights
    return left if fraction.max_tokens is None else min(left, fraction.max_tokens * demand.engine.kv_per_token)


def with_fraction(demand: GpuDemand, fraction: EngineFraction, gpu_bytes: int) -> tuple[GpuDemand, int]:
    """Return the demand of an engine with this fraction, and the size of its KV cache.

    SGLang's reserve for activations is generous: an engine with less memory outside the fraction gets what is left.
    """
    assert demand.engine is not None
    free = free_at_engine_start(demand, gpu_bytes)
    left = max(0, free - int(fraction.value * free) - demand.engine.graphs)
    engine = replace(demand.engine, working=min(demand.engine.working, left))
    return replace(demand, engine=engine), kv_cache_bytes(demand, fraction, gpu_bytes)


def largest_mem_fraction(demand: GpuDemand, gpu_bytes: int) -> float:
    """Return the largest fraction with which all phases of a step fit a GPU, rounded down; 0 if none does."""
    assert demand.engine is not None
    kv_bytes = largest_kv_cache(demand, gpu_bytes)
    if kv_bytes <= 0:
        return 0.0
    share = (demand.engine.weights + kv_bytes) / free_at_engine_start(demand, gpu_bytes)
    return math.floor(1000 * share) / 1000
