"""One weight update of an SGLang engine, from `begin` to `end`.

            begin            load ...             end(version)
serving ------------> open ----------> open ------------------> serving the new weights
   ^                    |  bucket refused, nothing written yet
   |--------------------'
                        |  a tensor missing at the end, or a failure after something was written
                        '----> mixed: refuses to generate until an update succeeds
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import WeightSyncError
from megarl.reshard.bucket import WeightBucket
from megarl.rollout.manifest import read_manifest
from megarl.rollout.receiver import IMPORT_PATH, dump_order, read_reply, reply_path, write_order

if TYPE_CHECKING:
    from megarl.rollout.host import EngineHost

NAMES_SHOWN = 8


class WeightSession:
    """Moves an engine through updates, and knows which weights it holds."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._arrived: set[str] = set()
        self._open = False
        self._mixed = False
        self._num_orders = 0
        self.policy_version = host.spec.policy_version
        """Of the weights that the engine serves."""

    def check_whole(self) -> None:
        """Nothing, unless parts of two versions are in the engine.

        Raises:
            WeightSyncError: they are.
        """
        if self._mixed and not self._open:
            raise WeightSyncError(
                f"the engine holds parts of version {self.policy_version} and of an update that failed; "
                f"it needs a whole update before it generates again"
            )

    async def begin(self) -> None:
        """Pause generation and open the update."""
        await self._close()
        await self._host.call(self._pause())
        await self._host.call(self._begin_update())
        self._open = True
        self._arrived.clear()

    async def load(self, bucket: WeightBucket) -> None:
        """Write one bucket.

        Raises:
            WeightSyncError: a rank refused or failed; the update is closed.
        """
        if not self._open:
            raise WeightSyncError("load_weights needs begin_weights first")
        spec = self._host.spec
        try:
            await self._execute(write_order(bucket, spec.model_path, spec.dtype))
        except WeightSyncError:
            await self._close()
            raise
        self._arrived.update(slot.name for slot in bucket.slots)

    async def end(self, policy_version: int) -> None:
        """Take the new version and go on.

        Raises:
            WeightSyncError: a tensor did not arrive; the update is closed and the version stays.
        """
        if not self._open:
            raise WeightSyncError("end_weights needs begin_weights first")
        manifest = read_manifest(self._host.spec.model_path)
        required = [name for name, entry in manifest.items() if entry.required]
        missing = [name for name in required if name not in self._arrived]
        if missing:
            await self._close()
            raise WeightSyncError(
                f"{len(missing)} of {len(required)} tensors did not arrive for version {policy_version}: "
                f"{_listing(missing)}"
            )
        try:
            await self._host.call(self._finish(policy_version))
            self.policy_version = policy_version
            self._mixed = False
        finally:
            self._open = False
        await self._host.call(self._resume())

    async def abort(self) -> None:
        """Close an open update without taking a version."""
        await self._close()

    async def dump(self, directory: str) -> None:
        """Every rank saves its parameters below `directory`."""
        if self._open:
            await self._execute(dump_order(directory))
            return
        await self._host.call(self._begin_update())
        try:
            await self._execute(dump_order(directory))
        finally:
            await self._host.call(self._end_update())

    async def _close(self) -> None:
        if not self._open:
            return  # another bucket's failure was quicker
        self._open = False
        await self._host.call(self._end_update())
        if not self._mixed:
            await self._host.call(self._resume())

    async def _execute(self, order: Mapping[str, Any]) -> None:
        """Have every TP rank execute the order, and read what each says."""
        self._num_orders += 1
        prefix = str(Path(self._host.directory) / f"reply-{self._num_orders}")
        writes, was_mixed = order["op"] == "write", self._mixed
        self._mixed |= writes  # until every rank has said that it wrote nothing; a cancelled call never learns
        ok, message = await self._host.call(self._send({**order, "reply": prefix}))
        errors = [] if ok else [message]
        wrote = False
        for rank in range(self._host.spec.tp):
            path = reply_path(prefix, rank)
            reply = read_reply(path)
            path.unlink(missing_ok=True)
            if reply is None:
                errors.append(f"TP rank {rank} did not reply")
            elif reply.error is not None:
                errors.append(f"TP rank {rank}: {reply.error}")
            wrote |= reply is None or reply.wrote
        self._mixed = was_mixed or (writes and wrote)
        if errors:
            raise WeightSyncError("; ".join(errors))

    async def _send(self, order: Mapping[str, Any]) -> tuple[bool, str]:
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        payload = MultiprocessingSerializer.serialize([(dict(order), torch.empty(0))])
        ok, message = await self._host.tokenizer_manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[payload] * self._host.spec.tp, load_format=IMPORT_PATH, flush_cache=False
            )
        )
        return bool(ok), str(message)

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

    async def _begin_update(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _demand(await self._host.tokenizer_manager.begin_weight_update(BeginWeightUpdateReqInput()))

    async def _end_update(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        _demand(await self._host.tokenizer_manager.end_weight_update(EndWeightUpdateReqInput()))

    async def _finish(self, policy_version: int) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._end_update()
        flushed = await self._host.tokenizer_manager.flush_cache()
        if not flushed.success:
            raise WeightSyncError("the engine kept keys and values of the old weights: requests were still running")
        version = UpdateWeightVersionReqInput(new_version=str(policy_version))
        await self._host.tokenizer_manager.update_weight_version(version)


def _demand(answer: tuple[bool, str]) -> None:
    ok, message = answer
    if not ok:
        raise WeightSyncError(message)


def _listing(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
