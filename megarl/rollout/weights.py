"""One weight update of an SGLang engine, from `begin` to `end`.

            begin            load ...             end(version)
serving ------------> open ----------> open ------------------> serving the new weights
   ^                    |  bucket refused, nothing written yet
   |--------------------'
                        |  a tensor or box missing at the end, or a failure after something was written
                        '----> mixed: refuses to generate until an update succeeds

Weights come whole under Hugging Face names (`load`), or as boxes of the engine's own parameters, for each TP rank its
own (`load_boxes`), or some this way and some that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import WeightSyncError
from megarl.reshard.bucket import BoxBucket, WeightBucket
from megarl.reshard.layout import Box
from megarl.rollout.encoding import decode_traces
from megarl.rollout.engine_trace import EngineTrace, listing
from megarl.rollout.manifest import read_manifest
from megarl.rollout.orders import (
    WRITING,
    Reply,
    dump_order,
    finish_order,
    hash_order,
    read_reply,
    reply_path,
    trace_order,
    write_boxes_order,
    write_order,
)
from megarl.rollout.receiver import IMPORT_PATH
from megarl.rollout.rendezvous import Parts, Rendezvous

if TYPE_CHECKING:
    from megarl.rollout.host import EngineHost


class WeightSession:
    """Moves an engine through updates, and knows which weights it holds."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._spec = host.spec
        self._arrived: set[str] = set()
        self._rendezvous: Rendezvous | None = None
        """Of the boxes of this update; None before the first."""
        self._open = False
        self._mixed = False
        self._num_updates = 0
        self._num_orders = 0
        self._one_at_a_time = asyncio.Lock()
        """For orders: what the engine holds would not be known if two of them were under way."""
        self._traces: list[EngineTrace] | None = None
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
        await self._close("another update began")
        await self._host.call(self._pause())
        await self._host.call(self._begin_update())
        self._open = True
        self._num_updates += 1
        self._arrived.clear()
        self._rendezvous = None

    async def load(self, bucket: WeightBucket) -> None:
        """Write one bucket.

        Raises:
            WeightSyncError: a rank refused or failed; the update is closed.
        """
        self._demand_open("load_weights needs begin_weights first")
        order = write_order(bucket, self._spec.model_path, self._spec.dtype)
        await self._or_close([order] * self._spec.tp)
        self._arrived.update(slot.name for slot in bucket.slots)

    async def load_boxes(self, tp_rank: int, index: int, bucket: BoxBucket | None) -> None:
        """Write one rank's part of round `index`, once the other ranks' parts are there.

        Raises:
            WeightSyncError: a rank refused or failed, or its part did not come; the update is closed.
        """
        self._demand_open("load_boxes needs begin_weights first")
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self._spec.tp, self._spec.round_timeout_seconds, self._write_boxes)
        try:
            await self._rendezvous.bring(tp_rank, index, bucket)
        except WeightSyncError as e:
            await self._close(str(e))
            raise

    async def end(self, policy_version: int) -> None:
        """Take the new version and go on.

        Raises:
            WeightSyncError: a tensor or box did not arrive; the update is closed and the version stays.
        """
        self._demand_open("end_weights needs begin_weights first")
        if self._rendezvous is not None:
            self._rendezvous.dismiss("the update was ended")
            order = finish_order(self._num_updates, self._arrived, self._spec.model_path, self._spec.dtype)
            await self._or_close([order] * self._spec.tp)
        else:
            await self._check_arrived(policy_version)
        try:
            await self._host.call(self._finish(policy_version))
            self.policy_version = policy_version
            self._mixed = False
        finally:
            self._open = False
        await self._host.call(self._resume())

    async def abort(self) -> None:
        """Close an open update without taking a version."""
        await self._close("the update was given up")

    async def dump(self, directory: str) -> None:
        """Every rank saves its parameters below `directory`."""
        await self._ask(dump_order(directory))

    async def traces(self) -> list[EngineTrace]:
        """What each TP rank's loader does, by rank.

        Raises:
            WeightSyncError: the model loads in a way that boxes cannot express.
        """
        if self._traces is None:
            replies = await self._ask(trace_order(self._spec.model_path, self._spec.dtype))
            self._traces = [decode_traces(reply.result)[0] for reply in replies]
        return self._traces

    async def piece_hashes(self) -> list[dict[tuple[str, Box], bytes]]:
        """By TP rank: tensor and box of each of its pieces -> digest of what its parameter holds.

        Raises:
            WeightSyncError: a rank holds a box twice, and differently.
        """
        traces = await self.traces()
        replies = await self._ask(hash_order(self._spec.model_path, self._spec.dtype))
        hashes: list[dict[tuple[str, Box], bytes]] = []
        for trace, reply in zip(traces, replies, strict=True):
            of_rank: dict[tuple[str, Box], bytes] = {}
            for piece, digest in zip(trace.layout.pieces, reply.result, strict=True):
                if of_rank.setdefault((piece.tensor, piece.box), bytes.fromhex(digest)).hex() != digest:
                    raise WeightSyncError(f"TP rank {reply.rank} holds {piece.tensor} twice, and differently")
            hashes.append(of_rank)
        return hashes

    def _demand_open(self, otherwise: str) -> None:
        if not self._open:
            raise WeightSyncError(otherwise)

    async def _check_arrived(self, policy_version: int) -> None:
        manifest = read_manifest(self._spec.model_path)
        required = [name for name, entry in manifest.items() if entry.required]
        missing = [name for name in required if name not in self._arrived]
        if missing:
            error = WeightSyncError(
                f"{len(missing)} of {len(required)} tensors did not arrive for version {policy_version}: "
                f"{listing(missing)}"
            )
            await self._close(str(error))
            raise error

    async def _close(self, reason: str) -> None:
        if not self._open:
            return  # another failure was quicker
        self._open = False
        if self._rendezvous is not None:
            self._rendezvous.dismiss(f"the update was closed: {reason}")
        async with self._one_at_a_time:
            await self._host.call(self._end_update())
            if not self._mixed:
                await self._host.call(self._resume())

    async def _write_boxes(self, parts: Parts) -> None:
        await self._or_close([write_boxes_order(part, self._num_updates) for part in parts])

    async def _or_close(self, orders: Sequence[Mapping[str, Any]]) -> None:
        try:
            async with self._one_at_a_time:
                self._demand_open("the update was closed meanwhile")
                await self._execute(orders)
        except WeightSyncError as e:
            await self._close(str(e))
            raise

    async def _ask(self, order: Mapping[str, Any]) -> list[Reply]:
        """The ranks' replies to an order that writes nothing, within an update or outside."""
        async with self._one_at_a_time:
            if self._open:
                return await self._execute([order] * self._spec.tp)
            await self._host.call(self._begin_update())
            try:
                return await self._execute([order] * self._spec.tp)
            finally:
                await self._host.call(self._end_update())

    async def _execute(self, orders: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """Have every TP rank execute its order, and read what each says."""
        self._num_orders += 1
        prefix = str(Path(self._host.directory) / f"reply-{self._num_orders}")
        writes, was_mixed = orders[0]["op"] in WRITING, self._mixed
        self._mixed |= writes  # until every rank has said that it wrote nothing; a cancelled call never learns
        ok, message = await self._host.call(self._send([{**order, "reply": prefix} for order in orders]))
        errors = [] if ok else [message]
        replies, wrote = [], False
        for rank in range(self._spec.tp):
            path = reply_path(prefix, rank)
            reply = read_reply(path)
            path.unlink(missing_ok=True)
            if reply is None:
                errors.append(f"TP rank {rank} did not reply")
            elif reply.error is not None:
                errors.append(f"TP rank {rank}: {reply.error}")
            else:
                replies.append(reply)
            wrote |= reply is None or reply.wrote
        self._mixed = was_mixed or (writes and wrote)
        if errors:
            raise WeightSyncError("; ".join(errors))
        return replies

    async def _send(self, orders: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        payloads = [MultiprocessingSerializer.serialize([(dict(order), torch.empty(0))]) for order in orders]
        ok, message = await self._host.tokenizer_manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=payloads, load_format=IMPORT_PATH, flush_cache=False
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
