"""One weight update of an SGLang engine, from `begin` to `end`.

            begin            load ...             end(version)
serving ------------> open ----------> open ------------------> serving the new weights
   ^                    |  bucket refused, nothing written yet
   |--------------------'
                        |  a tensor or box missing at the end, or a failure after something was written,
                        |  or the engine did not answer in time
                        '----> refuses to generate until an update succeeds

Weights come whole under Hugging Face names (`load`), or as boxes of the engine's own parameters, for each TP rank its
own, which somebody brings (`load_boxes`) or the ranks receive themselves (`receive`), or some this way and some that. A
bucket is refused by all TP ranks or by none.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import WeightSyncError, WorkerError
from megarl.reshard.layout.layout import Box
from megarl.reshard.planning.disaggregated import Handover
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.bucket import BoxBucket, WeightBucket
from megarl.reshard.transfer.process_groups import Meeting
from megarl.rollout.sglang.weight_layout.engine_trace import EngineTrace, listing
from megarl.rollout.sglang.weight_update.control_calls import UpdateCalls
from megarl.rollout.sglang.weight_update.expected_tensors import read_manifest
from megarl.rollout.sglang.weight_update.message_encoding import decode_traces
from megarl.rollout.sglang.weight_update.messages import (
    WRITING,
    Reply,
    dump_order,
    finish_order,
    hash_order,
    join_order,
    mark_path,
    prepare_order,
    read_reply,
    receive_order,
    reply_path,
    trace_order,
    write_boxes_order,
    write_order,
)
from megarl.rollout.sglang.weight_update.round_barrier import Parts, Rendezvous

if TYPE_CHECKING:
    from megarl.rollout.sglang.engine_host import EngineHost


class WeightSession:
    """Moves an engine through updates, and knows which weights it holds."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._spec = host.spec
        self._calls = UpdateCalls(host)
        self._arrived: set[str] = set()
        self._rendezvous: Rendezvous | None = None
        """Of the boxes that are brought in this update; None before the first."""
        self._received = False
        """The ranks were asked to receive boxes in this update."""
        self._prepared_whole: tuple[str, ...] = ()
        """Tensors that they receive whole."""
        self._sync_seconds = 0.0
        """How long the ranks may wait for those that they have joined."""
        self._watch: asyncio.Task[None] | None = None
        """Of the engine, for senders that wait for each other."""
        self._open = False
        self._mixed = False
        self._closed_because = ""
        """Why the last update failed."""
        self._stuck_because = ""
        """Why generation is paused and no update open."""
        self._num_updates = 0
        self._num_orders = 0
        self._one_at_a_time = asyncio.Lock()
        """For orders: what the engine holds would not be known if two of them were under way."""
        self._traces: list[EngineTrace] | None = None
        self.policy_version = host.spec.policy_version
        """Of the weights that the engine serves."""

    def check_whole(self) -> None:
        """Nothing, unless an update has left the engine in a state in which it must not generate.

        Raises:
            WeightSyncError: parts of two versions are in it, or it did not answer and its generation is paused.
            WorkerError: it has ended.
        """
        if self._host.failure is not None:
            raise self._host.failure
        if self._open:
            return
        if self._mixed:
            raise WeightSyncError(
                f"the engine holds parts of version {self.policy_version} and of an update that failed; "
                f"it needs a whole update before it generates again"
            )
        if self._stuck_because:
            raise WeightSyncError(
                f"the engine was paused for an update that failed ({self._stuck_because}); "
                f"it needs an update that succeeds before it generates again"
            )

    async def begin(self) -> None:
        """Pause generation and open the update.

        Raises:
            WeightSyncError: the engine does not answer.
        """
        await self._close("another update began")
        async with self._one_at_a_time:
            with self._stuck_if_it_fails():
                await self._calls.pause()
                await self._calls.begin()
        self._open, self._stuck_because = True, ""
        self._num_updates += 1
        self._arrived.clear()
        self._rendezvous, self._received = None, False

    async def load(self, bucket: WeightBucket) -> None:
        """Write one bucket.

        Raises:
            WeightSyncError: a rank refused or failed; the update is closed.
        """
        self._demand_open("load_weights")
        order = write_order(bucket, self._spec.model_path, self._spec.dtype)
        what = f"the order to load {listing([slot.name for slot in bucket.slots])}"
        await self._or_close([order] * self._spec.tp, what=what)
        self._arrived.update(slot.name for slot in bucket.slots)

    async def load_boxes(self, tp_rank: int, index: int, bucket: BoxBucket | None) -> None:
        """Write one rank's part of round `index`, once the other ranks' parts are there.

        Raises:
            WeightSyncError: a rank refused or failed, or its part did not come; the update is closed.
            WorkerError: a scheduler process has ended, also while the other ranks' parts were waited for.
        """
        self._demand_open("load_boxes")
        if self._host.failure is not None:
            raise self._host.failure
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self._spec.tp, self._spec.round_timeout_seconds, self._write_boxes)
            self._watch = asyncio.create_task(self._watch_host(self._rendezvous))
        try:
            await self._rendezvous.bring(tp_rank, index, bucket)
        except WeightSyncError as e:
            await self._close(str(e))
            raise

    async def prepare(self, handover: Handover, engine: int) -> None:
        """Have the ranks plan what they will receive, as engine number `engine` of `handover`.

        Raises:
            WeightSyncError: no trainer rank holds an element that they need.
        """
        path = Path(self._host.directory) / "handover"
        path.write_bytes(pickle.dumps(handover))
        try:
            await self._ask(prepare_order(path, engine))
        finally:
            path.unlink(missing_ok=True)
        self._prepared_whole = handover.whole

    async def join(self, meeting: Meeting) -> None:
        """Have the ranks connect with the trainer's, which have to join at the same time.

        Raises:
            WeightSyncError: another rank did not join in time.
        """
        self._sync_seconds = meeting.timeout_seconds
        await self._ask(join_order(meeting), extra_seconds=self._sync_seconds)

    async def receive(self) -> list[SyncStats]:
        """Have the ranks receive the model; by TP rank, what each has counted.

        Raises:
            WeightSyncError: a rank refused, or a rank of either side is gone or late; the update is closed.
        """
        self._demand_open("receive_weights")
        self._received = True
        orders = [receive_order(self._num_updates)] * self._spec.tp
        what = "the order to receive weights"
        replies = await self._or_close(orders, what=what, extra_seconds=self._sync_seconds)
        self._arrived.update(self._prepared_whole)
        return [SyncStats(**reply.result) for reply in replies]

    async def end(self, policy_version: int) -> None:
        """Take the new version and go on.

        Raises:
            WeightSyncError: a tensor or box did not arrive; the update is closed and the version stays.
        """
        self._demand_open("end_weights")
        if self._rendezvous is not None or self._received:
            self._dismiss("the update was ended before all TP ranks' boxes of the round had come")
            order = finish_order(self._num_updates, self._arrived, self._spec.model_path, self._spec.dtype)
            await self._or_close([order] * self._spec.tp, what="the order to finish the update")
        else:
            await self._check_arrived(policy_version)
        async with self._one_at_a_time:
            self._demand_open("end_weights")
            with self._stuck_if_it_fails():
                try:
                    await self._calls.end()
                    await self._calls.flush()
                    await self._calls.set_version(policy_version)
                    self.policy_version = policy_version
                    self._mixed, self._closed_because = False, ""
                finally:
                    self._open = False
                await self._calls.resume()

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

    def _demand_open(self, method: str) -> None:
        if not self._open:
            last = f"; the last update was closed: {self._closed_because}" if self._closed_because else ""
            raise WeightSyncError(f"{method} needs begin_weights first{last}")

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
        self._open, self._closed_because = False, reason
        self._dismiss(f"the update was closed: {reason}")
        async with self._one_at_a_time:
            if self._calls.behind:
                self._stuck_because = reason  # the next update waits for the answer
                return
            with self._stuck_if_it_fails():
                await self._calls.end()
                if not self._mixed:
                    await self._calls.resume()

    @contextmanager
    def _stuck_if_it_fails(self) -> Iterator[None]:
        """Around calls without which generation does not go on."""
        try:
            yield
        except (WeightSyncError, asyncio.CancelledError) as e:
            self._closed_because = self._stuck_because = str(e) or "the caller gave up"
            raise

    def _dismiss(self, reason: str) -> None:
        """Fail the senders that wait for each other."""
        if self._rendezvous is not None:
            self._rendezvous.dismiss(WeightSyncError(reason))
        if self._watch is not None:
            self._watch.cancel()

    async def _watch_host(self, rendezvous: Rendezvous) -> None:
        try:
            await self._host.watch()
        except WorkerError as e:
            rendezvous.dismiss(e)

    async def _write_boxes(self, index: int, parts: Parts) -> None:
        orders = [write_boxes_order(part, self._num_updates) for part in parts]
        await self._or_close(orders, what=f"round {index} of the weights")

    async def _or_close(
        self, orders: Sequence[Mapping[str, Any]], *, what: str, extra_seconds: float = 0.0
    ) -> list[Reply]:
        try:
            async with self._one_at_a_time:
                self._demand_open("writing")
                return await self._execute(orders, what, extra_seconds)
        except WeightSyncError as e:
            await self._close(str(e))
            raise

    async def _ask(self, order: Mapping[str, Any], extra_seconds: float = 0.0) -> list[Reply]:
        """The ranks' replies to an order that writes nothing, within an update or outside."""
        orders, what = [order] * self._spec.tp, f"the order `{order['op']}`"
        async with self._one_at_a_time:
            if self._open:
                return await self._execute(orders, what, extra_seconds)
            await self._calls.begin()
            try:
                return await self._execute(orders, what, extra_seconds)
            finally:
                if not self._calls.behind:
                    await self._calls.end()

    async def _execute(self, orders: Sequence[Mapping[str, Any]], what: str, extra_seconds: float = 0.0) -> list[Reply]:
        """Have every TP rank execute its order, and read what each says."""
        self._num_orders += 1
        prefix = str(Path(self._host.directory) / f"reply-{self._num_orders}")
        writes, was_mixed = orders[0]["op"] in WRITING, self._mixed
        self._mixed |= writes  # until every rank has said that it wrote nothing; one that is late may write yet
        complaint = await self._calls.send(
            [{**order, "reply": prefix} for order in orders],
            what=what,
            silent=lambda: self._silent(prefix),
            extra_seconds=extra_seconds,
        )
        errors = [] if complaint is None else [complaint]
        replies, wrote = [], False
        for rank in range(self._spec.tp):
            path = reply_path(prefix, rank)
            reply = read_reply(path)
            path.unlink(missing_ok=True)
            mark_path(prefix, rank).unlink(missing_ok=True)
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

    def _silent(self, prefix: str) -> list[int]:
        """TP ranks that have not replied, and of these rather those that the others wait for."""
        late = [rank for rank in range(self._spec.tp) if not reply_path(prefix, rank).exists()]
        return [rank for rank in late if not mark_path(prefix, rank).exists()] or late


def whole_tensors(traces: Sequence[EngineTrace]) -> tuple[str, ...]:
    """Of which some TP rank computes values of its own, in the model's order; see `RolloutEngine.whole_tensors`."""
    derived = {name for trace in traces for name in trace.derived}
    return tuple(name for name in traces[0].layout.tensors if name in derived)
