"""One weight update of an SGLang engine, from `begin` to `end`.

            begin            load ...             end(version)
    serving --------> open ----------> open ------------------> serving the new weights
       ^                |  bucket rejected, nothing written yet
       |----------------'
                        |  a tensor is missing at the end, or a failure after something was written,
                        |  or the engine did not answer in time
                        '----> refuses to generate until an update succeeds

There are two ways to load weights: full tensors under Hugging Face names (`load`), or boxes of each TP rank's
parameters (`receive`), which the ranks get from the trainer rank on the same slot (`prepare_boxes`) or over the network
(`join_trainer`). What is written is written by all TP ranks or by none.

While no update is open, commands that write nothing are executed such that SGLang processes no weights: it may repack
them at the end of an update. If it does, an aborted update counts as one that failed after something was
written.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.cluster.process.atomic_files import atomic_write
from megarl.engines.sglang.weight_layout.engine_trace import EngineTrace, box_text, decode_traces, join_names
from megarl.engines.sglang.weight_update.control_calls import ControlCalls
from megarl.engines.sglang.weight_update.messages import Command, Reply
from megarl.engines.sglang.weight_update.planned_boxes import read_expected_tensors
from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Ints
from megarl.reshard.planning.disaggregated import TransferSpec
from megarl.reshard.planning.strategy import DeltaUpdate, SyncStats
from megarl.reshard.transfer.box_channel import BoxOffer
from megarl.reshard.transfer.bucket import WeightBucket
from megarl.reshard.transfer.process_groups import TransferGroup

if TYPE_CHECKING:
    from megarl.engines.sglang.engine_host import EngineHost
    from megarl.engines.sglang.request_runner import RequestRunner


class WeightSession:
    """State machine of an engine's weight updates; knows which weights the engine holds.

    Methods raise WorkerError if the engine has ended, and WeightSyncError if there is no open update where one is
    needed, or if a TP rank refused, failed or did not answer in time, which closes an open update.
    """

    def __init__(self, host: EngineHost, requests: RequestRunner) -> None:
        """`requests`: those in flight, which pause during an update."""
        self._host = host
        self._spec = host.spec
        self.calls = ControlCalls(host, requests)
        self._arrived: set[str] = set()
        """Hugging Face tensors that were loaded in this update."""
        self._received = False
        """Whether the TP ranks have been commanded to receive boxes in this update."""
        self.sync_seconds = host.spec.round_timeout_seconds
        """Timeout of waits for other processes than the engine's, in seconds."""
        self._is_open = False
        self._closed_reason = ""
        """Why the last update failed."""
        self._blocked_reason = ""
        """Why generation is paused while no update is open."""
        self._is_lost = False
        """Whether the memory of the weights was released, and no update has succeeded since."""
        self._num_updates = 0
        self._base: int | None = None
        """`DeltaUpdate.number` of the sync whose weights, all of them, the engine holds, or held before the open
        update; None: unknown."""
        self._number: int | None = None
        """That of the open update."""
        self._traces: list[EngineTrace] | None = None
        self._repacked: list[str] | None = None
        """Modules whose weights SGLang changes after loading them; None until the TP ranks were asked."""
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
        if self._is_lost:
            raise WeightSyncError("the engine has released its weights; it needs an update before it can generate")
        if self.calls.is_mixed:
            raise WeightSyncError(
                f"the engine holds parts of version {self.policy_version} and of an update that failed; "
                f"it needs a complete update before it can generate"
            )
        if self._blocked_reason:
            raise WeightSyncError(
                f"the engine was paused for an update that failed ({self._blocked_reason}); "
                f"it needs a successful update before it can generate"
            )

    def mark_lost(self) -> None:
        """Record that the engine holds no weights; it generates again after the next update that succeeds."""
        self._is_lost, self._base = True, None

    @property
    def holds_requests(self) -> bool:
        """Whether requests wait until `resume_requests`."""
        return "memory" in self.calls.pause_reasons

    @property
    def has_queued_requests(self) -> bool:
        """Whether the requests that wait are in the queue of SGLang, which is then not idle."""
        return self.holds_requests and self.calls.pause_mode != "abort"

    async def hold_requests(self) -> None:
        """Pause generation, and keep it paused after updates, until `resume_requests`; no-op if it is."""
        if not self.holds_requests:
            async with self.calls.one_at_a_time, self._block_on_failure():
                await self.calls.pause("memory")

    async def resume_requests(self) -> None:
        """Resume generation after `hold_requests`; no-op if it is not paused."""
        if self.holds_requests:
            async with self.calls.one_at_a_time, self._block_on_failure():
                await self.calls.resume("memory")

    async def begin(self) -> None:
        """Pause generation and open the update."""
        await self.close("another update began")
        async with self.calls.one_at_a_time, self._block_on_failure():
            await self.calls.pause()
            await self.calls.begin()
        self._is_open, self._blocked_reason = True, ""
        self._num_updates += 1
        self._number = None
        self._arrived.clear()
        self._received = False
        await self._find_repacked()

    async def load(self, bucket: WeightBucket) -> None:
        """Write the tensors of one bucket."""
        names = [slot.name for slot in bucket.slots]
        command = {"op": "write", "bucket": asdict(bucket)}
        await self._execute_or_close("load_weights", command, f"the command to load {join_names(names)}")
        self._arrived.update(names)

    async def prepare_boxes(self, offers: Sequence[BoxOffer]) -> None:
        """Have each TP rank connect with the trainer rank on its slot, as `RolloutEngine.prepare_boxes`."""
        if len(offers) != self._spec.tp:
            raise WeightSyncError(f"the engine has {self._spec.tp} TP ranks, got boxes for {len(offers)}")
        await self._query({"op": "prepare", "offers": [asdict(offer) for offer in offers]})

    async def join_trainer(self, transfer_spec: TransferSpec, engine: int, transfer_group: TransferGroup) -> None:
        """Have the TP ranks plan what they receive and connect with the trainer's, as `RolloutEngine.join_trainer`."""
        try:
            paths = await self._host.share_file("transfer_spec", pickle.dumps(transfer_spec))
            await self._query({"op": "prepare", "transfer_spec": list(paths), "engine": engine})
        finally:
            await self._host.remove_file("transfer_spec")
        command = {"op": "connect", "transfer_group": asdict(transfer_group)}
        await self._query(command, extra_seconds=self.sync_seconds)

    async def receive(self, delta: DeltaUpdate | None = None) -> list[SyncStats]:
        """Have the TP ranks receive their boxes, then fill padding and compute derived values.

        Args:
            delta: what the trainer ranks leave out; None: nothing.

        Returns:
            The statistics of each rank; none for boxes from the same slot, which the trainer ranks count.

        Raises:
            WeightSyncError: also if a box did not arrive. The update stays open if the engine does not hold the weights
                that `delta` builds on.
        """
        self._require_open("receive_weights")
        if delta is not None:
            if delta.base not in (None, self._base):
                raise WeightSyncError(
                    f"the engine does not hold all weights of sync {delta.base}: it needs a full sync"
                )
            self._number = delta.number
        self._received = True
        waits = {"abort_file": str(self._abort_file), "seconds": self.sync_seconds}
        command: Command = {"op": "receive", "delta": None if delta is None else asdict(delta), **waits}
        what = "the command to receive weights"
        replies = await self._execute_or_close("receive_weights", command, what, self.sync_seconds)
        return [SyncStats(**reply.result) for reply in replies if reply.result is not None]

    async def verify(self, expected: Sequence[Ints]) -> str | None:
        """Compare the weights in the open update with the trainer's, as `RolloutEngine.verify_weights`."""
        self._require_open("verify_weights")
        await self._check_arrived()
        replies = await self._execute_or_close("verify_weights", {"op": "sum"}, "the command to sum the weights")
        for rank, (trace, sums, reply) in enumerate(zip(await self.traces(), expected, replies, strict=True)):
            problem = _find_difference(rank, trace, sums, **reply.result)
            if problem:
                self.calls.is_mixed = True
                await self.close(problem)
                return problem
        return None

    async def end(self, policy_version: int) -> None:
        """Set the new version and resume generation; if a tensor has not arrived, the version stays."""
        self._require_open("end_weights")
        await self._check_arrived()
        async with self.calls.one_at_a_time:
            self._require_open("end_weights")
            self._base = None
            async with self._block_on_failure():
                try:
                    await self.calls.end()
                    await self.calls.flush()
                    await self.calls.set_version(policy_version)
                    self.policy_version = policy_version
                    self.calls.is_mixed, self._is_lost, self._closed_reason = False, False, ""
                    self._base = self._number
                finally:
                    self._is_open = False
                await self.calls.resume()

    def check_open(self) -> None:
        """Raise WeightSyncError if the update has been closed, and WorkerError if the engine has ended."""
        if self._host.failure is not None:
            raise self._host.failure
        self._require_open("the update")

    async def abort_update(self, reason: str) -> None:
        """End `receive`: the TP ranks stop waiting for boxes."""
        # in one step: the TP ranks read the file as soon as it exists
        with atomic_write(self._abort_file, make_folder=False) as draft:
            draft.write_text(f"the update was aborted: {reason}")

    async def dump(self, directory: str) -> None:
        """Have every TP rank save its parameters in `directory`."""
        await self._query({"op": "dump", "directory": directory})

    async def traces(self) -> list[EngineTrace]:
        """Return the trace of each TP rank's loader.

        Raises:
            WeightSyncError: boxes cannot express how the model loads weights, or the engine repacks them afterwards.
        """
        if self._traces is None:
            repacked = await self._find_repacked()
            if repacked:
                raise WeightSyncError(
                    f"SGLang repacks the weights of {len(repacked)} modules after loading them, so that shards cannot "
                    f"be written into them: {join_names(repacked)}; set weight_sync.strategy: gather_hf and "
                    f"weight_sync.verify: null or, for experts, rollout.engine.extra_args.moe_runner_backend: triton"
                )
            replies = await self._query({"op": "trace"})
            self._traces = [decode_traces(base64.b64decode(reply.result))[0] for reply in replies]
        return self._traces

    async def _find_repacked(self) -> list[str]:
        """Return the modules whose weights SGLang changes after loading them."""
        if self._repacked is None:
            replies = await self._query({"op": "repacking"})
            self._repacked = sorted({name for reply in replies for name in reply.result})
        return self._repacked

    def _require_open(self, method: str) -> None:
        if not self._is_open:
            last = f"; the last update was closed: {self._closed_reason}" if self._closed_reason else ""
            raise WeightSyncError(f"{method} needs begin_weights first{last}")

    async def _check_arrived(self) -> None:
        """Raise WeightSyncError if full tensors are missing; boxes were checked when they were planned."""
        if self._received:
            return
        expected = read_expected_tensors(self._spec.model_path)
        required = [name for name, tensor in expected.items() if tensor.required]
        missing = [name for name in required if name not in self._arrived]
        if missing:
            error = WeightSyncError(f"{len(missing)} of {len(required)} tensors did not arrive: {join_names(missing)}")
            await self.close(str(error))
            raise error

    @property
    def _abort_file(self) -> Path:
        """File that ends the TP ranks' waits for boxes of the current update."""
        return Path(self._host.directory) / f"abort-{self._num_updates}"

    async def close(self, reason: str) -> None:
        """Abort the update, if it is open: resume generation, unless the engine may hold parts of two versions."""
        if not self._is_open:
            return  # another failure has closed it already
        self._is_open, self._closed_reason, self._base = False, reason, None
        # repacked weights were unpacked for the update, and what is packed now may be something else
        self.calls.is_mixed |= self._repacked is None or bool(self._repacked)
        async with self.calls.one_at_a_time:
            if self.calls.has_pending:
                self._blocked_reason = reason  # the next update waits for the pending call
                return
            async with self._block_on_failure():
                await self.calls.end()
                if not self.calls.is_mixed:
                    await self.calls.resume()

    @asynccontextmanager
    async def _block_on_failure(self) -> AsyncIterator[None]:
        """Context for calls that generation depends on: if one fails, generation is blocked until the next update."""
        try:
            yield
        except (WeightSyncError, asyncio.CancelledError) as e:
            self._closed_reason = self._blocked_reason = str(e) or "the caller was cancelled"
            raise

    async def _execute_or_close(
        self, method: str, command: Command, what: str, extra_seconds: float = 0.0
    ) -> list[Reply]:
        """Have the TP ranks execute a command in the open update, as `ControlCalls.execute`; close it if they do not.

        `method`: the name of the caller in errors.
        """
        try:
            async with self.calls.one_at_a_time:
                self._require_open(method)
                return await self.calls.execute(command, what, extra_seconds)
        except WeightSyncError as e:
            await self.close(str(e))
            raise

    async def _query(self, command: Command, extra_seconds: float = 0.0) -> list[Reply]:
        """Have the TP ranks execute a command that writes nothing; outside an update, SGLang processes no weights."""
        what = f"the command `{command['op']}`"
        if self._is_open:
            return await self._execute_or_close(what, command, what, extra_seconds)
        async with self.calls.one_at_a_time:
            await self.calls.begin(reads_only=True)
            try:
                return await self.calls.execute(command, what, extra_seconds)
            finally:
                if not self.calls.has_pending:
                    await self.calls.end()


def full_tensors(traces: Sequence[EngineTrace]) -> tuple[str, ...]:
    """Return the tensors that have to come in full because some TP rank computes values from them, in model order."""
    derived = {name for trace in traces for name in trace.derived}
    return tuple(name for name in traces[0].layout.tensors if name in derived)


def _find_difference(rank: int, trace: EngineTrace, expected: Ints, *, sums: Sequence[int], changed: list[str]) -> str:
    """Return what differs on a TP rank that replied `sums` and `changed` (`_sum_weights`); empty if all is equal."""
    different = np.flatnonzero(np.array(sums, np.int64) != expected)
    if len(different):
        piece = trace.layout.pieces[int(different[0])]
        others = f", nor {len(different) - 1} other boxes" if len(different) > 1 else ""
        return (
            f"TP rank {rank} does not hold the values of {piece.tensor} {box_text(piece.box)} that the trainer has "
            f"sent{others}"
        )
    if changed:
        return f"TP rank {rank} has other values than at its start of what no update writes: {join_names(changed)}"
    return ""
