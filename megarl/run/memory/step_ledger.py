"""The memory of one GPU over a step, added up in a ledger in the order in which `StepMemory` moves it in a run.

A step has these phases:

    sampling    engines generate
    scoring     auxiliary models, one after another: forward passes, and updates of critics
    training    the policy's update
    push        weights go to the engines

`StepMemory` moves device memory between the trainer and the engines that share its devices, as the phases need it:

                     engines hold           trainer holds
    sampling         weights, KV cache      nothing that can be offloaded
    begin_scoring    weights                nothing that can be offloaded    other models make forward passes
    begin_update                            nothing that can be offloaded    another model is trained
    begin_training                          everything
    begin_push       weights                weights
    begin_sampling   weights, KV cache      nothing that can be offloaded

The contents of what engines release are lost: a push of all weights follows a release of the weights, and prompts that
share a prefix are computed again after a release of the KV cache. Engines that do not release memory keep all of it.

The ledger has bytes by process and owner, and the moment of the highest total in each phase:

    ledger = DeviceLedger()
    with ledger.phase("training"):
        ledger.allocate("trainer", "activations", 2**30)
        ledger.free("trainer", "activations")
    ledger.peaks["training"].total    what the trainer held before, and 2**30

It stands in for a device: nothing is allocated. The part of a GPU's free memory that an engine fills with weights and
KV cache, SGLang's `mem_fraction_static`, is the largest whose ledger fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from megarl.config.run import RunConfig
from megarl.config.trainer import OffloadConfig
from megarl.engines.engine import KV_CACHE, WEIGHTS, EngineMemory
from megarl.errors import ConfigError
from megarl.megatron.requests import OffloadStats
from megarl.run.memory.gpu_demand import (
    CUDA_CONTEXT_BYTES,
    GIB,
    MIB,
    POLICY,
    USABLE_FRACTION,
    GpuDemand,
    ModelDemand,
    default_mem_fraction,
    gpu_demands,
)

LABELS = {"kv_cache": "KV cache"}
"""Owner -> its name in messages, where that is another."""

Account = tuple[str, str]
"""Process and owner of an allocation, such as `("trainer", "gradients")`."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Bytes by account at one moment."""

    by_account: Mapping[Account, int]

    @property
    def total(self) -> int:
        """Bytes of all accounts together."""
        return sum(self.by_account.values())

    def arithmetic(self) -> str:
        """Return the accounts with their GiB, largest first, and their sum; without those below 0.05 GiB."""
        parts = sorted(self.by_account.items(), key=lambda item: -item[1])
        named = (
            f"{process} {LABELS.get(owner, owner)} {size / GIB:.1f}"
            for (process, owner), size in parts
            if size >= GIB / 20
        )
        return f"{' + '.join(named)} = {self.total / GIB:.1f} GiB"


class DeviceLedger:
    """Memory of one device: what processes hold now, and what they held at the peak and at the end of each phase."""

    def __init__(self) -> None:
        self._held: dict[Account, int] = {}
        self._phase: str | None = None
        self.peaks: dict[str, Holdings] = {}
        """Phase -> holdings when their total was highest, over all times that the phase was entered."""
        self.ends: dict[str, Holdings] = {}
        """Phase -> holdings when it ended last."""

    @property
    def now(self) -> Holdings:
        """What processes hold now."""
        return Holdings(dict(self._held))

    def holds(self, process: str, owner: str) -> bool:
        """Return whether the account has an allocation, of any size."""
        return (process, owner) in self._held

    def allocate(self, process: str, owner: str, num_bytes: int) -> None:
        """Record an allocation. An account has one at a time."""
        assert (process, owner) not in self._held, f"{process} holds {owner} already"
        assert num_bytes >= 0, (process, owner, num_bytes)
        self._held[process, owner] = num_bytes
        self._record_peak()

    def free(self, process: str, owner: str) -> int:
        """Record that the account's allocation is freed, and return its bytes."""
        return self._held.pop((process, owner))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute what happens within to phase `name`.

        What is freed before the first allocation of a phase does not count to its peak.
        """
        assert self._phase is None, f"{name} within {self._phase}"
        self._phase = name
        yield
        self._record_peak()
        self.ends[name], self._phase = self.now, None

    def _record_peak(self) -> None:
        if self._phase is None:
            return
        if self._phase not in self.peaks or sum(self._held.values()) > self.peaks[self._phase].total:
            self.peaks[self._phase] = self.now


Phase = Callable[[str], AbstractContextManager[None]]
"""Makes the context manager that times a phase of the step, given its name."""


class OffloadingTrainer(Protocol):
    """The methods of `TrainerGroup` that move its memory."""

    @property
    def offload_config(self) -> OffloadConfig:
        """Which kinds of the trainer's state `offload` moves to host memory."""
        ...

    def offload(self) -> OffloadStats:
        """Move what only training needs to host memory; no-op for what is there already."""
        ...


class ReleasingEngines(Protocol):
    """The methods of `EngineGroup` that free and allocate its memory."""

    def release(self, memory: Sequence[EngineMemory]) -> None:
        """Free these kinds of memory on all engines; no-op for what is free already."""
        ...

    def resume(self, memory: Sequence[EngineMemory]) -> None:
        """Allocate these kinds of memory on all engines; no-op for what is allocated."""
        ...


class RequestClocks(Protocol):
    """The methods of `RolloutGroup` that stop the timeouts of requests in flight."""

    def pause_clocks(self) -> None:
        """Stop the timeouts until `resume_clocks`."""
        ...

    def resume_clocks(self) -> None:
        """Let the timeouts continue."""
        ...


class StepMemory:
    """Moves the memory of one trainer and its engines; a phase that is begun again moves nothing."""

    def __init__(
        self,
        trainer: OffloadingTrainer,
        engines: ReleasingEngines | None,
        phase: Phase,
        clocks: RequestClocks | None = None,
    ) -> None:
        """Args:
        engines: None if they keep their memory.
        clocks: of requests that are in flight while engines have no memory; None: there are none.
        """
        self._trainer, self._engines, self._phase, self._clocks = trainer, engines, phase, clocks
        self._current, self._freed = "", 0
        self.needs_push = False
        """Whether the engines have released their weights since the last push began."""

    def begin_scoring(self) -> None:
        """Make room for forward passes; nothing to do after an update."""
        if self._current not in ("scoring", "update", "training"):
            self._current = "scoring"
            self._release(KV_CACHE)

    def begin_update(self) -> None:
        """Make room for an update of another model than the policy, after which the weights have to be pushed."""
        if self._current not in ("update", "training"):
            self._current = "update"
            self._release(WEIGHTS, KV_CACHE)

    def begin_training(self) -> None:
        """Make room for an update of the policy, which brings back what is offloaded; a push of the weights follows."""
        self.begin_update()
        self._current = "training"

    def begin_push(self) -> None:
        """Make room for the engines' weights."""
        self._current, self.needs_push = "push", False
        if self._engines is not None:
            self._offload()
            with self._phase("resume"):
                self._engines.resume((WEIGHTS,))

    def begin_sampling(self) -> dict[str, float]:
        """Make room for the KV cache; return the metrics of what the trainer has offloaded since the last call."""
        if self._current == "sampling":
            return {}
        self._current = "sampling"
        host_bytes = self._offload()
        if self._engines is not None:
            with self._phase("resume"):
                self._engines.resume((WEIGHTS, KV_CACHE))
            if self._clocks is not None:
                self._clocks.resume_clocks()
        if host_bytes is None:
            return {}
        freed, self._freed = self._freed, 0
        return {"offload/device_bytes_freed": freed, "offload/host_bytes": host_bytes}

    def _release(self, *memory: EngineMemory) -> None:
        if self._engines is not None:
            if self._clocks is not None:
                self._clocks.pause_clocks()
            self.needs_push |= WEIGHTS in memory
            with self._phase("release"):
                self._engines.release(memory)

    def _offload(self) -> int | None:
        """Return the host memory held afterwards, in bytes; None if nothing is to be offloaded.

        Even then, what the trainer has cached goes back to the devices, if engines share them.
        """
        is_enabled = self._trainer.offload_config.is_enabled
        if not is_enabled and self._engines is None:
            return None
        with self._phase("offload"):
            stats = self._trainer.offload()
        self._freed += stats.device_bytes
        return stats.host_bytes if is_enabled else None


TRAINER, ENGINE = "trainer", "engine"

STATE_KINDS = ("parameters", "gradients", "main_parameters", "moments")
"""Kinds of state of a model: the fields of `StateBytes`."""

CACHES = {"quantized": "FP8 copies", "dummy_gradients": "dummy gradients"}
"""Fields of `CacheBytes` -> names of owners."""

OFFLOADED_BY = {
    "parameters": "weights",
    "gradients": "gradients",
    "main_parameters": "optimizer",
    "moments": "optimizer",
}
"""Kind of state -> field of `trainer.offload`."""


class LedgerModel:
    """A model in the trainer's process: allocates and frees its state in a ledger, as `TrainerMemory` does."""

    def __init__(self, ledger: DeviceLedger, demand: ModelDemand, offload: OffloadConfig) -> None:
        """`offload`: what `offload` frees (resolved)."""
        self._ledger, self._demand, self._offload = ledger, demand, offload

    @property
    def name(self) -> str:
        """Name of the model."""
        return self._demand.name

    @property
    def offload_config(self) -> OffloadConfig:
        """Which kinds of the model's state `offload` frees."""
        return self._offload

    def offload(self) -> OffloadStats:
        """Free what is configured and held, and caches of libraries."""
        for cache in CACHES.values():
            if self._ledger.holds(TRAINER, self._owner(cache)):
                self._ledger.free(TRAINER, self._owner(cache))
        kinds = [kind for kind in STATE_KINDS if getattr(self._offload, OFFLOADED_BY[kind])]
        held = [kind for kind in kinds if self._ledger.holds(TRAINER, self._owner(kind))]
        return OffloadStats(
            device_bytes=sum(self._ledger.free(TRAINER, self._owner(kind)) for kind in held), host_bytes=0
        )

    def onload(self) -> None:
        """Allocate all of the state that is not held."""
        for kind in STATE_KINDS:
            self._onload(kind)

    def onload_weights(self) -> None:
        """Allocate the parameters if they are not held."""
        self._onload("parameters")

    def forward(self) -> None:
        """Make a forward pass: allocate its activations, and free them."""
        self.onload_weights()
        self._fill("quantized")
        self._use("activations", self._demand.activations.forward)

    def update(self) -> None:
        """Make a forward and a backward pass with all of the state."""
        self.onload()
        for cache in CACHES:
            self._fill(cache)
        self._ledger.allocate(TRAINER, self._owner("activations"), self._demand.activations.stored)
        self._use("recomputed activations", self._demand.activations.recomputed)
        self._use("language head", self._demand.activations.head)
        self._ledger.free(TRAINER, self._owner("activations"))

    def _use(self, owner: str, num_bytes: int) -> None:
        self._ledger.allocate(TRAINER, self._owner(owner), num_bytes)
        self._ledger.free(TRAINER, self._owner(owner))

    def _onload(self, kind: str) -> None:
        self._hold(kind, getattr(self._demand.state, kind))

    def _fill(self, cache: str) -> None:
        self._hold(CACHES[cache], getattr(self._demand.caches, cache))

    def _hold(self, owner: str, num_bytes: int) -> None:
        """Allocate what is not held yet."""
        if num_bytes and not self._ledger.holds(TRAINER, self._owner(owner)):
            self._ledger.allocate(TRAINER, self._owner(owner), num_bytes)

    def _owner(self, kind: str) -> str:
        return f"{self.name} {kind.replace('_', ' ')}"


class LedgerEngine:
    """An engine rank: allocates and frees weights and KV cache in a ledger, as SGLang's memory saver does."""

    def __init__(self, ledger: DeviceLedger, sizes: dict[EngineMemory, int]) -> None:
        self._ledger, self._sizes = ledger, sizes

    def release(self, memory: Sequence[EngineMemory]) -> None:
        """Free these kinds of memory where held."""
        for kind in memory:
            if self._ledger.holds(ENGINE, kind):
                self._ledger.free(ENGINE, kind)

    def resume(self, memory: Sequence[EngineMemory]) -> None:
        """Allocate these kinds of memory where not held."""
        for kind in memory:
            if not self._ledger.holds(ENGINE, kind):
                self._ledger.allocate(ENGINE, kind, self._sizes[kind])


MakeMemory = Callable[[OffloadingTrainer, ReleasingEngines | None, Phase], StepMemory]


class StepSimulation:
    """Drives a ledger through the steps of a run, with the class that moves memory in a run.

    The ledger starts with the first phase, `sampling`: the trainer has been built and has offloaded.
    """

    def __init__(
        self,
        demand: GpuDemand,
        kv_bytes: int,
        make_memory: MakeMemory = StepMemory,
        ledger: DeviceLedger | None = None,
    ) -> None:
        """Args:
        kv_bytes: size of the KV cache.
        make_memory: makes what moves the memory; another class than a run's in tests.
        ledger: an empty ledger; None: a new one.
        """
        self.demand, self.ledger = demand, DeviceLedger() if ledger is None else ledger
        everything = OffloadConfig(optimizer=True, gradients=True, weights=True)
        self._models = [
            LedgerModel(self.ledger, model, demand.offload if model.name == POLICY else everything)
            for model in demand.models
        ]
        self._allocate_processes()
        engine = None
        if demand.engine is not None:
            engine = LedgerEngine(self.ledger, {WEIGHTS: demand.engine.weights, KV_CACHE: kv_bytes})
            engine.resume((WEIGHTS, KV_CACHE))
        self._policy = policy = next((model for model in self._models if model.name == POLICY), None)
        releases = engine if demand.releases_engine_memory else None
        self._memory = None if policy is None else make_memory(policy, releases, lambda _: nullcontext())

    def run(self, steps: int = 2) -> DeviceLedger:
        """Run so many steps and return the ledger; the second step is as every later one."""
        for _ in range(steps):
            self._sample()
            self._score()
            self._train()
            self._push()
        return self.ledger

    def _allocate_processes(self) -> None:
        demand, ledger = self.demand, self.ledger
        if demand.models:
            ledger.allocate(TRAINER, "CUDA context", CUDA_CONTEXT_BYTES)
            ledger.allocate(TRAINER, "NCCL", demand.nccl_bytes)
        if demand.engine is not None:
            ledger.allocate(ENGINE, "CUDA context", CUDA_CONTEXT_BYTES)
            ledger.allocate(ENGINE, "NCCL", demand.engine_nccl_bytes)
            ledger.allocate(ENGINE, "CUDA graphs", demand.engine.graphs)
        for model, wanted in zip(self._models, demand.models, strict=True):
            model.onload_weights()
            if wanted.is_trained:
                model.onload()
            if wanted.name == POLICY or wanted.offload_when_idle:
                model.offload()

    def _sample(self) -> None:
        if self.demand.engine is None:
            return
        with self.ledger.phase("sampling"):
            if self._memory is not None:
                self._memory.begin_sampling()
            self.ledger.allocate(ENGINE, "working memory", self.demand.engine.working)
            self.ledger.free(ENGINE, "working memory")

    def _score(self) -> None:
        others = [pair for pair in zip(self._models, self.demand.models, strict=True) if pair[1].name != POLICY]
        if not others and not self.demand.scores_with_policy:
            return
        with self.ledger.phase("scoring"):
            if self._memory is not None:
                self._memory.begin_scoring()
            if self._policy is not None and self.demand.scores_with_policy:
                self._policy.forward()
            for model, wanted in others:
                model.forward()
                if wanted.offload_when_idle:
                    model.offload()
            for model, wanted in others:
                if wanted.is_trained:
                    if self._memory is not None:
                        self._memory.begin_update()
                    model.update()
                    if wanted.offload_when_idle:
                        model.offload()

    def _train(self) -> None:
        if self._memory is None or self._policy is None:
            return
        with self.ledger.phase("training"):
            self._memory.begin_training()
            self._policy.update()

    def _push(self) -> None:
        if not self.demand.bucket_bytes:
            return
        with self.ledger.phase("push"):
            if self._memory is not None and self._policy is not None:
                self._memory.begin_push()
                self._policy.onload_weights()
            owner = TRAINER if self._policy is not None else ENGINE
            self.ledger.allocate(owner, "buckets", self.demand.bucket_bytes)
            self.ledger.free(owner, "buckets")


def step_ledger(demand: GpuDemand, kv_bytes: int) -> DeviceLedger:
    """Return the ledger of a GPU after two steps, with a KV cache of `kv_bytes`."""
    return StepSimulation(demand, kv_bytes).run()


def peak(ledger: DeviceLedger) -> int:
    """Return the highest total of all phases: that of the largest, as what a phase needs is freed for the next."""
    return max(holdings.total for holdings in ledger.peaks.values())


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
