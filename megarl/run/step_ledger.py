"""The memory of one GPU over a step, added up in a ledger in the order in which `StepMemory` moves it in a run.

A step has these phases:

    sampling    engines generate
    scoring     auxiliary models, one after another: forward passes, and updates of critics
    training    the policy's update
    push        weights go to the engines
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from megarl.config.trainer import OffloadConfig
from megarl.device_memory.gpu_demand import POLICY, GpuDemand, ModelDemand
from megarl.device_memory.gpus import CUDA_CONTEXT_BYTES
from megarl.device_memory.ledger import DeviceLedger
from megarl.megatron.requests import OffloadStats
from megarl.rollout.engine import KV_CACHE, WEIGHTS, EngineMemory
from megarl.run.step_memory import OffloadingTrainer, Phase, ReleasingEngines, StepMemory

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
