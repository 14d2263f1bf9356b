"""Calls of a weight update to SGLang, with timeouts.

caller                          engine thread                     scheduler processes
call(work) -------------------> work ---------------------------> one of them hangs
 | answer_timeout_seconds       |
 '-- WeightSyncError            | not cancelled: SGLang may still execute it
next call ---- waits for it ----'
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Literal

from megarl.engines.sglang.weight_update.messages import Command, Reply, find_unresponsive, reply_prefix
from megarl.engines.sglang.weight_update.weight_loader import IMPORT_PATH, WRITERS
from megarl.errors import WeightSyncError

if TYPE_CHECKING:
    from megarl.engines.sglang.engine_host import EngineHost
    from megarl.engines.sglang.request_runner import RequestRunner


PauseReason = Literal["update", "memory"]
"""A weight update, or memory that the engine has released."""


class ControlCalls:
    """Calls to SGLang, among them the commands to the TP ranks. The caller must hold `one_at_a_time`.

    Every method raises WeightSyncError if SGLang refuses or does not answer in time, and WorkerError if the engine's
    processes have ended.
    """

    def __init__(self, host: EngineHost, requests: RequestRunner) -> None:
        self._host, self._requests = host, requests
        self.one_at_a_time = asyncio.Lock()
        """Serializes calls: with two in flight, it would be unknown what the engine holds."""
        self.is_mixed = False
        """The engine may hold parts of two versions."""
        self.pause_mode = host.spec.pause_mode
        """What happens to requests in flight during a pause."""
        self._seconds = host.spec.answer_timeout_seconds
        self.pending: asyncio.Task[object] | None = None
        """The last call, until it is answered; a task with the name of the call in error messages."""
        self._called_at = 0.0
        """`time.monotonic` at the start of the last call."""
        self.pause_reasons: set[PauseReason] = set()
        """Why decoding is paused: those of `pause`, until `resume`."""
        self._begun = False
        """SGLang is in a weight update (between `begin_weight_update` and `end_weight_update`)."""
        self._num_commands = 0

    @property
    def has_pending(self) -> bool:
        """A previous call has not been answered yet."""
        return self.pending is not None and not self.pending.done()

    async def pause(self, reason: PauseReason = "update") -> None:
        """Pause decoding; requests in flight are kept, and new ones wait."""
        if not self.pause_reasons - {"update"}:  # an update that has failed may have been resumed or not
            await self._call("pause_generation", self._pause)
        self.pause_reasons.add(reason)

    async def resume(self, reason: PauseReason = "update") -> None:
        """Resume decoding after `pause`, unless it is also paused for another reason."""
        if not self.pause_reasons - {reason}:
            await self._call("continue_generation", self._resume)
        self.pause_reasons.discard(reason)

    async def begin(self, *, reads_only: bool = False) -> None:
        """Begin a weight update in SGLang; an update that is still open is ended first.

        SGLang executes commands only within an update, whose end processes the weights of the models that the update
        was begun for. An update that only reads is begun for the draft model, which engines do not have: its begin and
        end change nothing.
        """
        if self.pending is not None or self._begun:
            await self.end()
        await self._call("begin_weight_update", lambda: self._begin("draft" if reads_only else "target"))

    async def end(self) -> None:
        """End the weight update in SGLang; does nothing if none is open."""
        await self._call("end_weight_update", self._end)

    async def flush(self) -> None:
        """Flush the prefix cache; nothing is cached where requests keep the keys and values of the old weights."""
        if self.pause_mode != "in_place":
            await self._call("flush_cache", self._flush)

    async def set_version(self, policy_version: int) -> None:
        """Set the policy version that SGLang records for every new token."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        version = UpdateWeightVersionReqInput(new_version=str(policy_version))
        await self._call("update_weight_version", lambda: self._host.tokenizer_manager.update_weight_version(version))

    async def execute(self, command: Command, what: str, extra_seconds: float = 0.0) -> list[Reply]:
        """Have every TP rank execute a command inside of an update.

        Args:
            what: name of the command in error messages.
            extra_seconds: additional timeout, for waits for other processes than the engine's.
        """
        spec = self._host.spec
        self._num_commands += 1
        number, folders = self._num_commands, await self._host.folders()
        common = {**command, "model_path": spec.model_path, "dtype": spec.dtype}
        complete = [{**common, "reply": reply_prefix(folder, number)} for folder in folders]
        writes, was_mixed = command["op"] in WRITERS, self.is_mixed
        self.is_mixed |= writes  # until every rank has replied that it wrote nothing; a late rank may still write
        sglang_error = await self._call(what, lambda: self._send(complete), number, extra_seconds)
        errors = [] if sglang_error is None else [sglang_error]
        replies, wrote = [], False
        for rank, reply in enumerate(await self._host.take_replies(number)):
            if reply is None:
                errors.append(f"TP rank {rank} did not reply")
            elif reply.error is not None:
                errors.append(f"TP rank {rank}: {reply.error}")
            else:
                replies.append(reply)
            wrote |= reply is None or reply.wrote
        self.is_mixed = was_mixed or (writes and wrote)
        if errors:
            raise WeightSyncError("; ".join(errors))
        return replies

    async def _call[T](
        self,
        what: str,
        work: Callable[[], Coroutine[Any, Any, T]],
        command: int | None = None,
        extra_seconds: float = 0.0,
    ) -> T:
        """Return the result of `work`; `command`: its number if it is a command, whose late ranks errors name."""
        seconds = self._seconds + extra_seconds
        await self._wait_for_pending()
        task = asyncio.create_task(self._host.call(work()), name=what)
        # kept until it is answered, even if the caller is cancelled
        self.pending, self._called_at = task, time.monotonic()
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            late = [] if command is None else find_unresponsive(await self._host.reply_states(command))
            who = ", ".join([await self._host.describe(rank) for rank in late]) or "the engine"
            raise WeightSyncError(f"{who} did not answer {what} within {seconds:g} s")
        self.pending = None
        return task.result()

    async def _wait_for_pending(self) -> None:
        task, seconds = self.pending, time.monotonic() - self._called_at
        if task is None:
            return
        await asyncio.wait([task], timeout=self._seconds)
        if not task.done():
            raise WeightSyncError(
                f"the engine has not answered {task.get_name()} yet, which was sent {seconds:.0f} s ago; "
                f"if it does not recover, it must be restarted"
            )
        self.pending = None
        if not task.cancelled():
            task.exception()  # marks it as retrieved: its update has failed already

    async def _send(self, commands: Sequence[Command]) -> str | None:
        """Return SGLang's error message; None if it reports success."""
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        payloads = [MultiprocessingSerializer.serialize([(dict(command), torch.empty(0))]) for command in commands]
        ok, message = await self._host.tokenizer_manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=payloads, load_format=IMPORT_PATH, flush_cache=False, selector="target"
            )
        )
        return None if ok else str(message)

    async def _pause(self) -> None:
        if self.pause_mode == "abort":
            await self._requests.hold()
            return
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._requests.keep_waiting()
        try:
            # `retract` frees the KV cache: sequences resume with keys and values recomputed under the new weights
            await self._host.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=self.pause_mode))
        except BaseException:
            self._requests.resume()
            raise

    async def _resume(self) -> None:
        if self.pause_mode != "abort":
            from sglang.srt.managers.io_struct import ContinueGenerationReqInput

            empty_cache = self._host.spec.device != "cpu"
            await self._host.tokenizer_manager.continue_generation(
                ContinueGenerationReqInput(torch_empty_cache=empty_cache)
            )
        self._requests.resume()

    async def _begin(self, selector: Literal["target", "draft"]) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        request = BeginWeightUpdateReqInput(selector=selector)
        _raise_if_refused(await self._host.tokenizer_manager.begin_weight_update(request))
        self._begun = True

    async def _end(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        if self._begun:
            _raise_if_refused(await self._host.tokenizer_manager.end_weight_update(EndWeightUpdateReqInput()))
            self._begun = False

    async def _flush(self) -> None:
        # aborted requests have just ended: with a timeout, a flush waits until SGLang has processed them
        seconds = self._seconds if self.pause_mode == "abort" else None
        flushed = await self._host.tokenizer_manager.flush_cache(timeout_s=seconds)
        if not flushed.success:
            raise WeightSyncError(
                "the engine could not flush keys and values of the old weights: requests were still running"
            )


def _raise_if_refused(answer: tuple[bool, str]) -> None:
    ok, message = answer
    if not ok:
        raise WeightSyncError(message)
