"""The SGLang implementation of megarl's engine interface.

Takes prompts as token ids; returns token ids, log-probabilities and policy versions. An instance needs a process of
its own (a Ray actor, or a plain script), started with the environment variables of
`megarl.engines.sglang.server_args.make_engine_environment`:

    engine = SglangEngine(spec)
    await engine.start()
    generation = await engine.generate(request)
    await engine.shutdown()

Device memory is freed and allocated through SGLang's memory saver. Freed memory keeps its addresses, so that CUDA
graphs and the boxes of a weight sync stay valid. Without CUDA there is no memory saver: SGLang empties its cache of
prefixes, and keeps the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import override

from megarl.cluster.workers.dispatch import CallBatches
from megarl.engines.engine import (
    WEIGHTS,
    EngineMemory,
    EngineUpdate,
    FinishedRequest,
    Generation,
    GenerationRequest,
    RolloutEngine,
    UpdateReport,
)
from megarl.engines.engine_spec import EngineSpec, make_engine_spec
from megarl.engines.sglang.engine_host import EngineHost
from megarl.engines.sglang.multi_node_host import EngineNode, MultiNodeHost
from megarl.engines.sglang.request_runner import RequestRunner
from megarl.engines.sglang.weight_layout.engine_trace import EngineTrace
from megarl.engines.sglang.weight_update.update_session import WeightSession, full_tensors
from megarl.engines.update_runner import UpdateRunner
from megarl.errors import LostEngineError, WorkerError
from megarl.reshard.layout.boxes import Ints
from megarl.reshard.layout.layout import Box, WeightLayout, WeightNeeds, share_tensors
from megarl.reshard.planning.disaggregated import TransferSpec
from megarl.reshard.transfer.box_channel import BoxOffer
from megarl.reshard.transfer.bucket import WeightBucket
from megarl.reshard.transfer.process_groups import TransferGroup


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


RequestBatches = CallBatches[GenerationRequest, Generation]
"""The batches in progress on one engine."""


__all__ = ["EngineHealth", "EngineSpec", "SglangEngine", "make_engine_spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """The state of an engine that replies."""

    policy_version: int
    num_requests: int
    """Number of requests in flight."""
    num_waiting: int
    """Number of these that SGLang has not been sent yet."""
    concurrency_limit: int | None
    """Number of requests that SGLang may have at a time, see `RequestGate`; None before the first one."""
    scheduler_pids: tuple[int, ...]
    """Pids of the scheduler processes on their nodes, one per TP rank."""


class SglangEngine(RolloutEngine):
    """An engine of SGLang. Every method may raise LostEngineError: the engine's processes have exited."""

    def __init__(self, spec: EngineSpec, nodes: Sequence[EngineNode] = ()) -> None:
        """Args:
        nodes: the other nodes that the engine spans, in the order of their TP ranks.
        """
        self._spec = spec
        self._host = MultiNodeHost(spec, nodes) if nodes else EngineHost(spec)
        self._requests = RequestRunner(self._host, spec.stop_token_ids, spec.routes)
        self._weights = WeightSession(self._host, self._requests)
        self._update = UpdateRunner(self._weights)
        self._released = ReleasedMemory(self._host)
        self.batches = RequestBatches(self._requests.complete)
        """The batches of requests in progress."""
        self._num_requests = 0

    async def start(self) -> None:
        """Start the engine and return once it is ready.

        Raises:
            ConfigError: the port is in use, or SGLang does not know an argument.
            WorkerError: the engine did not start.
        """
        await self._host.start()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return one completion of the request.

        Raises:
            WorkerError: SGLang rejected the request (for example, it is too long), or a newer request has the same id.
            WeightSyncError: the engine holds no weights, or a mixture of weights after a failed weight update.
        """
        (generation,) = await self.generate_many([request])
        return generation

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one completion per request, in order, once all are done; raises as `generate`."""
        self._check_can_generate()
        self._num_requests += len(requests)
        try:
            return await self._host.call(self._requests.complete_all(requests))
        finally:
            self._num_requests -= len(requests)

    async def begin_requests(self, batch_id: str, requests: Sequence[GenerationRequest]) -> list[FinishedRequest]:
        """Begin a batch of requests; return its first completions, see `RequestBatches`; raises as `generate`."""
        self._check_can_generate()
        return await self._host.call(self.batches.begin(batch_id, requests))

    def _check_can_generate(self) -> None:
        """Raise if a request would fail now; while requests are held, new ones wait with them."""
        if self._weights.holds_requests:
            return
        self._released.check_allocated()
        self._weights.check_consistent()

    async def finished_requests(self, batch_id: str) -> list[FinishedRequest]:
        """Return the next completions of a batch."""
        return await self._host.call(self.batches.collect(batch_id))

    async def partial_outputs(self, known: Mapping[str, int]) -> dict[str, Generation]:
        """Return the tokens of requests in flight, without those known; see `GenerationEngine.partial_outputs`."""
        return await self._host.call(self._requests.partial_outputs(known))

    async def abort(self, request_id: str) -> None:
        """End a request early: it returns the tokens so far with finish_reason `abort`. Unknown ids are ignored.

        A request that arrives within `EARLY_ABORT_SECONDS` of its abort ends, too: it was overtaken on the way.
        """
        await self._host.call(self._requests.abort(request_id))

    async def abort_groups(self, request_ids: Sequence[str]) -> None:
        """End all requests of these groups early, whose ids begin with that of the group and a `-`."""
        await self._host.call(self._requests.abort_groups(request_ids))

    async def abort_all(self) -> None:
        """End all requests in flight early."""
        await self._host.call(self._requests.abort_all())

    @override
    async def release(self, memory: Sequence[EngineMemory]) -> None:
        if self._spec.holds_requests:
            await self._weights.hold_requests()
        if await self._released.release(memory, is_paused=self._weights.has_queued_requests):
            self._weights.mark_lost()

    @override
    async def resume(self, memory: Sequence[EngineMemory]) -> None:
        await self._released.resume(memory)
        if self._released.is_allocated:
            await self._weights.resume_requests()

    @override
    async def begin_weights(self) -> None:
        """Stop decoding and open a weight update; requests in flight wait and continue with the new weights.

        Aborts an update that is already open.
        """
        await self._weights.begin()

    @override
    async def load_weights(self, bucket: WeightBucket) -> None:
        await self._weights.load(bucket)

    @override
    async def layouts(self) -> list[WeightLayout]:
        """Return the weight layout of each TP rank, by rank, traced from the model's loader (`engine_trace`).

        Raises:
            WeightSyncError: the model loads its weights in a way that boxes cannot express.
        """
        return [trace.layout for trace in await self.traces()]

    async def traces(self) -> list[EngineTrace]:
        """Return the layouts with padding and with the tensors that need `load_weights`; raises as `layouts`."""
        return await self._weights.traces()

    @override
    async def full_tensors(self) -> tuple[str, ...]:
        """Return the tensors that every update must send through `load_weights`; raises as `layouts`."""
        return full_tensors(await self.traces())

    @override
    async def weight_needs(self) -> WeightNeeds:
        """Return `layouts` and `full_tensors` together, to be sent; raises as `layouts`."""
        layouts = share_tensors(await self.layouts())
        return WeightNeeds(layouts=tuple(layouts), full_tensors=await self.full_tensors())

    @override
    async def weight_needs_digest(self) -> bytes:
        """Return the digest of `weight_needs`; raises as `layouts`."""
        return (await self.weight_needs()).digest

    @override
    async def update_weights(self, update: EngineUpdate) -> UpdateReport:
        return await self._update.run(update)

    @override
    async def prepare_boxes(self, offers: Sequence[BoxOffer]) -> None:
        await self._weights.prepare_boxes(offers)

    @override
    async def join_trainer(self, transfer_spec: TransferSpec, engine: int, transfer_group: TransferGroup) -> None:
        await self._weights.prepare(transfer_spec, engine)
        await self._weights.connect(transfer_group)

    async def piece_hashes(self) -> list[dict[tuple[str, Box], bytes]]:
        """Return for each TP rank: (tensor, box) of each piece of its layout -> `digest` of the parameter's values."""
        return await self._weights.piece_hashes()

    @override
    async def verify_weights(self, expected: Sequence[Ints]) -> str | None:
        return await self._weights.verify(expected)

    async def read_weights(self, directory: str) -> None:
        """Save the parameters and the buffers of every TP rank as torch files (name -> tensor).

        Args:
            directory: folder for `rank<r>.pt` and `rank<r>.buffers.pt`.
        """
        await self._weights.dump(directory)

    async def health(self) -> EngineHealth:
        """Return the engine's state; waits until the schedulers have finished their current step."""
        await self._host.call(self._host.tokenizer_manager.get_internal_state())
        return EngineHealth(
            policy_version=self._weights.policy_version,
            num_requests=self._num_requests + self.batches.num_unfinished,
            num_waiting=self._requests.gate.num_waiting,
            concurrency_limit=self._requests.gate.limit,
            scheduler_pids=tuple(await self._host.scheduler_pids()),
        )

    async def watch(self) -> LostEngineError:
        """Wait until the engine ends, and return the reason."""
        try:
            await self._host.watch()
        except LostEngineError as error:
            return error

    async def ping(self) -> LostEngineError | None:
        """Return None once the engine is known to be alive (see `EngineHost.ping`), or the reason why it ended."""
        try:
            await self._host.ping()
        except LostEngineError as error:
            return error
        return None

    async def first_completion_time(self) -> float | None:
        """Return the Unix time when the first completion was finished; None before that."""
        return self._requests.first_completion

    async def shutdown(self) -> None:
        """Stop the engine's processes; requests in flight are lost. May be called twice."""
        await self._host.shutdown()
