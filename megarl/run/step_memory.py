"""Moves device memory between the trainer and the engines that share its devices, as the phases of a step need it.

                     engines hold           trainer holds
    sampling         weights, KV cache      nothing that can be offloaded
    begin_scoring    weights                nothing that can be offloaded    other models make forward passes
    begin_update                            nothing that can be offloaded    another model is trained
    begin_training                          everything
    begin_push       weights                weights
    begin_sampling   weights, KV cache      nothing that can be offloaded

The contents of what engines release are lost: a push of all weights follows a release of the weights, and prompts that
share a prefix are computed again after a release of the KV cache. Engines that do not release memory keep all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from megarl.config.trainer import OffloadConfig
from megarl.rollout.engine import KV_CACHE, WEIGHTS, EngineMemory

if TYPE_CHECKING:
    from megarl.megatron.runtime.offload import OffloadStats

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
        """Stop the timeouts."""
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
