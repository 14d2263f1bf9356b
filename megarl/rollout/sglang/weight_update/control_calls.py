"""What an update of weights asks of SGLang, with a limit to the patience.

caller                          engine thread                     scheduler processes
call(work) -------------------> work ---------------------------> one of them is stuck
 | answer_timeout_seconds       |
 '-- WeightSyncError            | not cancelled: SGLang may execute it yet
next call ---- waits for it ----'
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.errors import WeightSyncError
from megarl.rollout.sglang.weight_update.weight_loader import IMPORT_PATH

if TYPE_CHECKING:
    from megarl.rollout.sglang.engine_host import EngineHost

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call that has not been answered."""

    what: str
    at: float
    task: asyncio.Future[Any]


class UpdateCalls:
    """One call at a time: the caller sees to it.

    Every method raises WeightSyncError where SGLang refuses or does not answer in time, and WorkerError where the
    engine's processes have ended.
    """

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._seconds = host.spec.answer_timeout_seconds
        self._asked: _Asked | None = None
        self._begun = False
        """SGLang is in an update of its own counting."""

    @property
    def behind(self) -> bool:
        """A call has not been answered yet."""
        return self._asked is not None and not self._asked.task.done()

    async def pause(self) -> None:
        """Stop decoding; requests in flight stay."""
        await self._call("pause_generation", self._pause)

    async def resume(self) -> None:
        """Decode again."""
        await self._call("continue_generation", self._resume)

    async def begin(self) -> None:
        """Have SGLang take orders; an update that was left open ends first."""
        if self._asked is not None or self._begun:
            await self.end()
        await self._call("begin_weight_update", self._begin)

    async def end(self) -> None:
        """SGLang takes no more orders; no error where it takes none already."""
        await self._call("end_weight_update", self._end)

    async def flush(self) -> None:
        """Drop cached keys and values."""
        await self._call("flush_cache", self._flush)

    async def set_version(self, policy_version: int) -> None:
        """What SGLang notes for every token from now on."""
        await self._call("update_weight_version", lambda: self._set_version(policy_version))

    async def send(
        self, orders: Sequence[Mapping[str, Any]], *, what: str, silent: Callable[[], list[int]], extra_seconds: float
    ) -> str | None:
        """Have every TP rank execute its order.

        Args:
            what: names the orders in errors.
            silent: TP ranks of which nothing has been heard.
            extra_seconds: how long the ranks may wait for others than themselves.

        Returns:
            What SGLang has to complain of.
        """

        def who() -> str:
            return ", ".join(self._host.describe(rank) for rank in silent()) or "the engine"

        return await self._call(what, lambda: self._send(orders), who, extra_seconds)

    async def _call(
        self,
        what: str,
        work: Callable[[], Coroutine[Any, Any, T]],
        who: Callable[[], str] = lambda: "the engine",
        extra_seconds: float = 0.0,
    ) -> T:
        seconds = self._seconds + extra_seconds
        await self._catch_up()
        task = asyncio.ensure_future(self._host.call(work()))
        self._asked = _Asked(what, time.monotonic(), task)  # until it is answered, also if this caller is cancelled
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise WeightSyncError(f"{who()} did not answer {what} within {seconds:g} s")
        self._asked = None
        return task.result()

    async def _catch_up(self) -> None:
        if self._asked is None:
            return
        task, what, seconds = self._asked.task, self._asked.what, time.monotonic() - self._asked.at
        await asyncio.wait([task], timeout=self._seconds)
        if not task.done():
            raise WeightSyncError(
                f"the engine has not answered {what} yet, which it was asked {seconds:.0f} s ago; "
                f"if it does not recover, it must be started anew"
            )
        self._asked = None
        if not task.cancelled():
            task.exception()  # the update that it belongs to has failed already

    async def _send(self, orders: Sequence[Mapping[str, Any]]) -> str | None:
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        payloads = [MultiprocessingSerializer.serialize([(dict(order), torch.empty(0))]) for order in orders]
        ok, message = await self._host.tokenizer_manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=payloads, load_format=IMPORT_PATH, flush_cache=False
            )
        )
        return None if ok else str(message)

    async def _pause(self) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        # `retract` gives the KV cache back: sequences go on under the new weights with keys recomputed
        await self._host.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode="retract"))

    async def _resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        empty_cache = self._host.spec.device != "cpu"
        await self._host.tokenizer_manager.continue_generation(
            ContinueGenerationReqInput(torch_empty_cache=empty_cache)
        )

    async def _begin(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _demand(await self._host.tokenizer_manager.begin_weight_update(BeginWeightUpdateReqInput()))
        self._begun = True

    async def _end(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        if self._begun:
            _demand(await self._host.tokenizer_manager.end_weight_update(EndWeightUpdateReqInput()))
            self._begun = False

    async def _flush(self) -> None:
        flushed = await self._host.tokenizer_manager.flush_cache()
        if not flushed.success:
            raise WeightSyncError("the engine kept keys and values of the old weights: requests were still running")

    async def _set_version(self, policy_version: int) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        version = UpdateWeightVersionReqInput(new_version=str(policy_version))
        await self._host.tokenizer_manager.update_weight_version(version)


def _demand(answer: tuple[bool, str]) -> None:
    ok, message = answer
    if not ok:
        raise WeightSyncError(message)
