"""Frees and allocates an engine's device memory, through SGLang's memory saver.

Freed memory keeps its addresses, so that CUDA graphs and the boxes of a weight sync stay valid. Without CUDA there is
no memory saver: SGLang empties its cache of prefixes, and keeps the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.errors import WorkerError
from megarl.rollout.engine import WEIGHTS, EngineMemory

if TYPE_CHECKING:
    from megarl.rollout.sglang.engine_host import EngineHost


class ReleasedMemory:
    """What an engine has released."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._released: set[EngineMemory] = set()

    @property
    def is_allocated(self) -> bool:
        """Whether nothing is released."""
        return not self._released

    def check_allocated(self) -> None:
        """Raise WorkerError if something is released, so that the engine cannot generate."""
        if self._released:
            raise WorkerError(f"the engine has released its {_names(self._released)}; it cannot generate before resume")

    async def release(self, memory: Sequence[EngineMemory], *, is_paused: bool = False) -> bool:
        """Release what is not released yet; return whether the weights are among it.

        Args:
            is_paused: requests in flight wait in the queue of SGLang; else wait until none is in flight.

        Raises:
            WorkerError: requests are still in flight after `answer_timeout_seconds`.
        """
        chosen = [each for each in memory if each not in self._released]
        if chosen:
            await self._host.call(self._release(chosen, is_paused=is_paused))
        self._released.update(chosen)
        return WEIGHTS in chosen

    async def resume(self, memory: Sequence[EngineMemory]) -> None:
        """Allocate what is released."""
        chosen = [each for each in memory if each in self._released]
        if chosen:
            await self._host.call(self._resume(chosen))
        self._released.difference_update(chosen)

    async def _release(self, memory: list[EngineMemory], *, is_paused: bool) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        manager, seconds = self._host.tokenizer_manager, self._host.spec.answer_timeout_seconds
        # a release ends a busy scheduler; with a timeout, a flush also waits until its queue is empty
        flushed = await manager.flush_cache(timeout_s=None if is_paused else seconds)
        if not flushed.success:
            raise WorkerError(
                f"the engine cannot release its {_names(memory)}: requests are in flight after {seconds:g} s"
            )
        await manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(memory)))

    async def _resume(self, memory: list[EngineMemory]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._host.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(memory)))


def _names(memory: Sequence[EngineMemory] | set[EngineMemory]) -> str:
    return " and ".join(sorted(each.replace("kv_cache", "KV cache") for each in memory))
