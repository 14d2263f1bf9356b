"""One weight update of an SGLang engine, from `begin` to `end`.

            begin            load ...             end(version)
    serving --------> open ----------> open ------------------> serving the new weights
       ^                |  bucket rejected, nothing written yet
       |----------------'
                        |  a tensor or box is missing at the end, or a failure after something was written,
                        |  or the engine did not answer in time
                        '----> refuses to generate until an update succeeds

There are three ways to load weights, which can be combined in one update: full tensors under Hugging Face names
(`load`), boxes of each TP rank's parameters from senders (`load_boxes`), or boxes that the TP ranks receive themselves
(`receive`). A bucket is rejected by all TP ranks or by none.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import WeightSyncError, WorkerError
from megarl.reshard.layout.layout import Box
from megarl.reshard.planning.disaggregated import TransferSpec
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.bucket import BoxBucket, WeightBucket
from megarl.reshard.transfer.process_groups import TransferGroup
from megarl.rollout.sglang.weight_layout.engine_trace import EngineTrace, join_names
from megarl.rollout.sglang.weight_update.control_calls import ControlCalls
from megarl.rollout.sglang.weight_update.expected_tensors import read_expected_tensors
from megarl.rollout.sglang.weight_update.message_encoding import decode_traces
from megarl.rollout.sglang.weight_update.messages import (
    WRITING,
    Command,
    Reply,
    checked_path,
    connect_command,
    dump_command,
    finish_command,
    hash_command,
    prepare_command,
    read_reply,
    receive_command,
    reply_path,
    trace_command,
    write_boxes_command,
    write_command,
)
from megarl.rollout.sglang.weight_update.round_barrier import Parts, RoundBarrier

if TYPE_CHECKING:
    from megarl.rollout.sglang.engine_host import EngineHost


class WeightSession:
    """State machine of an engine's weight updates; knows which weights the engine holds."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._spec = host.spec
        self._calls = ControlCalls(host)
        self._arrived: set[str] = set()
        """Hugging Face tensors that were loaded in this update."""
        self._barrier: RoundBarrier | None = None
        """Barrier for the boxes that senders deliver in this update; None before the first."""
        self._received = False
        """Whether the TP ranks have been commanded to receive boxes in this update."""
        self._prepared_full_tensors: tuple[str, ...] = ()
        """Tensors that the TP ranks receive in full, under Hugging Face names."""
        self._sync_seconds = 0.0
        """Timeout of the TP ranks' waits for the ranks that they are connected with, in seconds."""
        self._watch: asyncio.Task[None] | None = None
        """Watches the engine's processes, to fail senders that wait for each other."""
        self._is_open = False
        self._is_mixed = False
        """The engine may hold parts of two versions."""
        self._closed_reason = ""
        """Why the last update failed."""
        self._blocked_reason = ""
        """Why generation is paused while no update is open."""
        self._num_updates = 0
        self._num_commands = 0
        self._one_at_a_time = asyncio.Lock()
        """Serializes commands: with two in flight, it would be unknown what the engine holds."""
        self._traces: list[EngineTrace] | None = None
        self.policy_version = host.spec.policy_version
        """Policy version of the weights that the engine serves."""

    def check_consistent(self) -> None:
        """Raise if a failed update has left the engine in a state in which it must not generate.

        Raises:
            WeightSyncError: the engine holds parts of two versions, or did not answer and its generation is paused.
            WorkerError: the engine has ended.
        """
        if self._host.failure is not None:
            raise self._host.failure
        if self._is_open:
            return
        if self._is_mixed:
            raise WeightSyncError(
                f"the engine holds parts of version {self.policy_version} and of an update that failed; "
                f"it needs a complete update before it can generate"
            )
        if self._blocked_reason:
            raise WeightSyncError(
                f"the engine was paused for an update that failed ({self._blocked_reason}); "
                f"it needs a successful update before it can generate"
            )

    async def begin(self) -> None:
        """Pause generation and open the update.

        Raises:
            WeightSyncError: the engine does not answer.
        """
        await self._close("another update began")
        async with self._one_at_a_time:
            with self._block_on_failure():
                await self._calls.pause()
                await self._calls.begin()
        self._is_open, self._blocked_reason = True, ""
        self._num_updates += 1
        self._arrived.clear()
        self._barrier, self._received = None, False

    async def load(self, bucket: WeightBucket) -> None:
        """Write one bucket.

        Raises:
            WeightSyncError: a rank refused or failed; the update is closed.
        """
        self._require_open("load_weights")
        command = write_command(bucket, self._spec.model_path, self._spec.dtype)
        what = f"the command to load {join_names([slot.name for slot in bucket.slots])}"
        await self._execute_or_close([command] * self._spec.tp, what=what)
        self._arrived.update(slot.name for slot in bucket.slots)

    async def load_boxes(self, tp_rank: int, index: int, bucket: BoxBucket | None) -> None:
        """Write one rank's part of round `index` as soon as the parts of all ranks have arrived.

        Raises:
            WeightSyncError: a rank refused or failed, or its part did not arrive; the update is closed.
            WorkerError: a scheduler process has ended, possibly while waiting for the other ranks' parts.
        """
        self._require_open("load_boxes")
        if self._host.failure is not None:
            raise self._host.failure
        if self._barrier is None:
            self._barrier = RoundBarrier(self._spec.tp, self._spec.round_timeout_seconds, self._write_boxes)
            self._watch = asyncio.create_task(self._watch_host(self._barrier))
        try:
            await self._barrier.arrive(tp_rank, index, bucket)
        except WeightSyncError as e:
            await self._close(str(e))
            raise

    async def prepare(self, transfer_spec: TransferSpec, engine: int) -> None:
        """Have the TP ranks plan what they will receive, as engine `engine` of `transfer_spec`.

        Raises:
            WeightSyncError: no trainer rank holds an element that they need.
        """
        path = Path(self._host.directory) / "transfer_spec"
        path.write_bytes(pickle.dumps(transfer_spec))
        try:
            await self._query(prepare_command(path, engine))
        finally:
            path.unlink(missing_ok=True)
        self._prepared_full_tensors = transfer_spec.full_tensors

    async def connect(self, transfer_group: TransferGroup) -> None:
        """Have the TP ranks connect with the trainer's ranks, which have to connect at the same time.

        Raises:
            WeightSyncError: another rank did not connect in time.
        """
        self._sync_seconds = transfer_group.timeout_seconds
        await self._query(connect_command(transfer_group), extra_seconds=self._sync_seconds)

    async def receive(self) -> list[SyncStats]:
        """Have the TP ranks receive the model; return the statistics of each rank.

        Raises:
            WeightSyncError: a rank refused, or a rank of trainer or engine was lost or timed out; the update is closed.
        """
        self._require_open("receive_weights")
        self._received = True
        commands = [receive_command(self._num_updates)] * self._spec.tp
        what = "the command to receive weights"
        replies = await self._execute_or_close(commands, what=what, extra_seconds=self._sync_seconds)
        self._arrived.update(self._prepared_full_tensors)
        return [SyncStats(**reply.result) for reply in replies]

    async def end(self, policy_version: int) -> None:
        """Set the new version and resume generation.

        Raises:
            WeightSyncError: a tensor or box did not arrive; the update is closed and the version stays.
        """
        self._require_open("end_weights")
        if self._barrier is not None or self._received:
            self._abort_rounds("the update was ended before the round's boxes of all TP ranks had arrived")
            command = finish_command(self._num_updates, self._arrived, self._spec.model_path, self._spec.dtype)
            await self._execute_or_close([command] * self._spec.tp, what="the command to finish the update")
        else:
            await self._check_arrived(policy_version)
        async with self._one_at_a_time:
            self._require_open("end_weights")
            with self._block_on_failure():
                try:
                    await self._calls.end()
                    await self._calls.flush()
                    await self._calls.set_version(policy_version)
                    self.policy_version = policy_version
                    self._is_mixed, self._closed_reason = False, ""
                finally:
                    self._is_open = False
                await self._calls.resume()

    async def dump(self, directory: str) -> None:
        """Have every TP rank save its parameters in `directory`."""
        await self._query(dump_command(directory))

    async def traces(self) -> list[EngineTrace]:
        """Return the trace of each TP rank's loader.

        Raises:
            WeightSyncError: boxes cannot express how the model loads weights.
        """
        if self._traces is None:
            replies = await self._query(trace_command(self._spec.model_path, self._spec.dtype))
            self._traces = [decode_traces(reply.result)[0] for reply in replies]
        return self._traces

    async def piece_hashes(self) -> list[dict[tuple[str, Box], bytes]]:
        """Return, by TP rank, the digest of each piece's values in the parameter, by (tensor, box).

        Raises:
            WeightSyncError: a rank holds a box twice, with different values.
        """
        traces = await self.traces()
        replies = await self._query(hash_command(self._spec.model_path, self._spec.dtype))
        hashes: list[dict[tuple[str, Box], bytes]] = []
        for trace, reply in zip(traces, replies, strict=True):
            of_rank: dict[tuple[str, Box], bytes] = {}
            for piece, digest in zip(trace.layout.pieces, reply.result, strict=True):
                if of_rank.setdefault((piece.tensor, piece.box), bytes.fromhex(digest)).hex() != digest:
                    raise WeightSyncError(f"TP rank {reply.rank} holds {piece.tensor} twice, with different values")
            hashes.append(of_rank)
        return hashes

    def _require_open(self, method: str) -> None:
        if not self._is_open:
            last = f"; the last update was closed: {self._closed_reason}" if self._closed_reason else ""
            raise WeightSyncError(f"{method} needs begin_weights first{last}")

    async def _check_arrived(self, policy_version: int) -> None:
        expected = read_expected_tensors(self._spec.model_path)
        required = [name for name, tensor in expected.items() if tensor.required]
        missing = [name for name in required if name not in self._arrived]
        if missing:
            error = WeightSyncError(
                f"{len(missing)} of {len(required)} tensors did not arrive for version {policy_version}: "
                f"{join_names(missing)}"
            )
            await self._close(str(error))
            raise error

    async def _close(self, reason: str) -> None:
        if not self._is_open:
            return  # another failure has closed it already
        self._is_open, self._closed_reason = False, reason
        self._abort_rounds(f"the update was closed: {reason}")
        async with self._one_at_a_time:
            if self._calls.has_pending:
                self._blocked_reason = reason  # the next update waits for the pending call
                return
            with self._block_on_failure():
                await self._calls.end()
                if not self._is_mixed:
                    await self._calls.resume()

    @contextmanager
    def _block_on_failure(self) -> Iterator[None]:
        """Context for calls that generation depends on: if one fails, generation is blocked until the next update."""
        try:
            yield
        except (WeightSyncError, asyncio.CancelledError) as e:
            self._closed_reason = self._blocked_reason = str(e) or "the caller was cancelled"
            raise

    def _abort_rounds(self, reason: str) -> None:
        """Fail the senders that wait for each other."""
        if self._barrier is not None:
            self._barrier.abort(WeightSyncError(reason))
        if self._watch is not None:
            self._watch.cancel()

    async def _watch_host(self, barrier: RoundBarrier) -> None:
        try:
            await self._host.watch()
        except WorkerError as e:
            barrier.abort(e)

    async def _write_boxes(self, index: int, parts: Parts) -> None:
        commands = [write_boxes_command(part, self._num_updates) for part in parts]
        await self._execute_or_close(commands, what=f"round {index} of the weights")

    async def _execute_or_close(
        self, commands: Sequence[Command], *, what: str, extra_seconds: float = 0.0
    ) -> list[Reply]:
        try:
            async with self._one_at_a_time:
                self._require_open("writing")
                return await self._execute(commands, what, extra_seconds)
        except WeightSyncError as e:
            await self._close(str(e))
            raise

    async def _query(self, command: Command, extra_seconds: float = 0.0) -> list[Reply]:
        """Execute a command that writes nothing, inside or outside of an update; return the ranks' replies."""
        commands, what = [command] * self._spec.tp, f"the command `{command['op']}`"
        async with self._one_at_a_time:
            if self._is_open:
                return await self._execute(commands, what, extra_seconds)
            await self._calls.begin()
            try:
                return await self._execute(commands, what, extra_seconds)
            finally:
                if not self._calls.has_pending:
                    await self._calls.end()

    async def _execute(self, commands: Sequence[Command], what: str, extra_seconds: float = 0.0) -> list[Reply]:
        """Have every TP rank execute its command, and read the replies."""
        self._num_commands += 1
        prefix = str(Path(self._host.directory) / f"reply-{self._num_commands}")
        writes, was_mixed = commands[0]["op"] in WRITING, self._is_mixed
        self._is_mixed |= writes  # until every rank has replied that it wrote nothing; a late rank may still write
        sglang_error = await self._calls.send(
            [{**command, "reply": prefix} for command in commands],
            what=what,
            unresponsive=lambda: self._unresponsive(prefix),
            extra_seconds=extra_seconds,
        )
        errors = [] if sglang_error is None else [sglang_error]
        replies, wrote = [], False
        for rank in range(self._spec.tp):
            path = reply_path(prefix, rank)
            reply = read_reply(path)
            path.unlink(missing_ok=True)
            checked_path(prefix, rank).unlink(missing_ok=True)
            if reply is None:
                errors.append(f"TP rank {rank} did not reply")
            elif reply.error is not None:
                errors.append(f"TP rank {rank}: {reply.error}")
            else:
                replies.append(reply)
            wrote |= reply is None or reply.wrote
        self._is_mixed = was_mixed or (writes and wrote)
        if errors:
            raise WeightSyncError("; ".join(errors))
        return replies

    def _unresponsive(self, prefix: str) -> list[int]:
        """Return the TP ranks that have not replied; if some wait for others in the vote, only those others."""
        late = [rank for rank in range(self._spec.tp) if not reply_path(prefix, rank).exists()]
        return [rank for rank in late if not checked_path(prefix, rank).exists()] or late


def full_tensors(traces: Sequence[EngineTrace]) -> tuple[str, ...]:
    """Return the tensors that must be loaded in full because some TP rank computes values from them, in model order."""
    derived = {name for trace in traces for name in trace.derived}
    return tuple(name for name in traces[0].layout.tensors if name in derived)
