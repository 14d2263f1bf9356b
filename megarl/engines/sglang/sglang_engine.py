"""The SGLang implementation of megarl's engine interface.

Takes prompts as token ids; returns token ids, log-probabilities and policy versions. An instance needs a process of
its own (a Ray actor, or a plain script), started with the environment variables of
`megarl.engines.sglang.engine_environment.make_engine_environment`:

    engine = SglangEngine(spec)
    await engine.start()
    generation = await engine.generate(request)
    await engine.shutdown()

Device memory is freed and allocated through SGLang's memory saver. Freed memory keeps its addresses, so that CUDA
graphs and the boxes of a weight sync stay valid. Without CUDA there is no memory saver: SGLang empties its cache of
prefixes, and keeps the memory.

An engine may have TP ranks on several nodes:

    node 0: MultiNodeHost                                 other nodes: an EngineHost in another process each
    tokenizer manager, TP ranks 0 ... n-1                 TP ranks n ...
      |        '-- torch.distributed: requests, commands, activations --'
      '-- EngineNode.ask: start, watch, replies of the TP ranks, files for them, shutdown

SGLang itself sends requests and commands from TP rank 0 to the others. Files that TP ranks exchange with the engine's
host go through the host of their node. The engine is lost once a scheduler process or a host is lost on any node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, override

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
from megarl.engines.sglang.request_runner import RequestRunner
from megarl.engines.sglang.weight_layout.engine_trace import EngineTrace
from megarl.engines.sglang.weight_update.messages import Reply, ReplyState
from megarl.engines.sglang.weight_update.update_session import WeightSession, full_tensors
from megarl.engines.update_runner import UpdateRunner
from megarl.errors import LostEngineError, WeightSyncError, WorkerError
from megarl.reshard.layout.layout import Ints, WeightLayout, WeightNeeds, share_tensors
from megarl.reshard.planning.disaggregated import TransferSpec
from megarl.reshard.transfer.box_channel import BoxOffer
from megarl.reshard.transfer.bucket import WeightBucket
from megarl.reshard.transfer.process_groups import TransferGroup

P = ParamSpec("P")
T = TypeVar("T")

ROOT_CAUSE_SECONDS = 2.0
"""How long to wait for the errors of other nodes once one has failed to start."""

NODE_SHUTDOWN_SECONDS = 3.0
"""How long to wait for the host of another node at shutdown."""


class EngineNode(Protocol):
    """Another node of an engine, whose EngineHost runs in another process."""

    @property
    def name(self) -> str:
        """Name of the node in messages."""
        ...

    async def start(self, dist_init_addr: str) -> None:
        """Start the schedulers of the node; raises as `EngineHost.start` does."""
        ...

    async def ask(
        self, method: Callable[Concatenate[EngineHost, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the result of a method of the node's EngineHost.

        Raises:
            LostEngineError: the host's process has ended.
        """
        ...

    async def shutdown(self) -> None:
        """Stop the node's processes, even while they start."""
        ...


class MultiNodeHost(EngineHost):
    """The host of an engine's first node, which starts, monitors and stops the others too."""

    def __init__(self, spec: EngineSpec, nodes: Sequence[EngineNode]) -> None:
        """Args:
        spec: the engine on its first node, with `dist_init_addr`.
        nodes: the other nodes, in the order of their TP ranks.
        """
        super().__init__(spec)
        assert spec.nnodes == len(nodes) + 1, (spec.nnodes, len(nodes))
        self._nodes = nodes
        self._folders: list[str] = []
        self._watches: list[asyncio.Task[None]] = []
        """Each ends with its node."""

    async def start(self) -> None:
        """Start all nodes at the same time; if one fails, stop all and raise its error."""
        address = self.spec.dist_init_addr
        assert address is not None
        starts: list[Coroutine[Any, Any, None]] = [super().start(), *(node.start(address) for node in self._nodes)]
        tasks = [asyncio.ensure_future(start) for start in starts]
        try:
            await _wait_started(tasks)
            self._folders = await self._of_all_nodes(super().folders(), lambda node: node.ask(EngineHost.folders))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.shutdown()
            raise
        self._watches = [asyncio.create_task(self._watch_node(node)) for node in self._nodes]

    async def shutdown(self) -> None:
        """Stop the processes of all nodes; calls in progress raise LostEngineError."""
        await asyncio.gather(super().shutdown(), *map(_shut_down, self._nodes))

    async def describe(self, rank: int) -> str:
        """Return the TP rank, pid, OS process state and node of a scheduler process as text, for error messages."""
        index = rank // len(self.spec.node_ranks)
        if index == 0:
            return await super().describe(rank)
        node = self._nodes[index - 1]
        return await self._limited(node, node.ask(EngineHost.describe, rank))

    async def scheduler_pids(self) -> list[int]:
        """Return the pid of each scheduler process on its node, by TP rank."""
        return await self._of_all_nodes(super().scheduler_pids(), lambda node: node.ask(EngineHost.scheduler_pids))

    async def processor_seconds(self) -> list[float]:
        """Return the CPU seconds that each scheduler process has used, by TP rank; waits for a node that hangs."""
        others = [node.ask(EngineHost.processor_seconds) for node in self._nodes]
        return list(chain.from_iterable(await asyncio.gather(super().processor_seconds(), *others)))

    async def share_file(self, name: str, content: bytes) -> list[str]:
        """Write a file for the TP ranks on each node; return the path at which each of them can read it."""
        own = super().share_file(name, content)
        return await self._of_all_nodes(own, lambda node: node.ask(EngineHost.share_file, name, content))

    async def remove_file(self, name: str) -> None:
        """Remove a shared file on each node."""
        await asyncio.gather(
            super().remove_file(name),
            *(self._limited(node, node.ask(EngineHost.remove_file, name)) for node in self._nodes),
        )

    async def folders(self) -> list[str]:
        """Return for each TP rank the folder on its node in which it exchanges files with the host."""
        return self._folders

    async def reply_states(self, number: int) -> list[ReplyState]:
        """Return the state of each TP rank for command `number`."""
        own = super().reply_states(number)
        return await self._of_all_nodes(own, lambda node: node.ask(EngineHost.reply_states, number))

    async def take_replies(self, number: int) -> list[Reply | None]:
        """Return each TP rank's reply to command `number`, None for a missing one, and remove their files."""
        own = super().take_replies(number)
        return await self._of_all_nodes(own, lambda node: node.ask(EngineHost.take_replies, number))

    async def ping_schedulers(self) -> None:
        """As in the base class; the hosts of the other nodes must answer too."""
        await self.processor_seconds()  # returns only if the hosts of all nodes answer
        await super().ping_schedulers()

    async def _of_all_nodes(self, own: Awaitable[list[T]], ask: Callable[[EngineNode], Awaitable[list[T]]]) -> list[T]:
        """Return the values of all TP ranks, by rank: those of this node, then what each of the other nodes answers.

        Raises:
            WeightSyncError: a node did not answer in time.
            LostEngineError: the process of a node's host has ended.
        """
        others = [self._limited(node, ask(node)) for node in self._nodes]
        return list(chain.from_iterable(await asyncio.gather(own, *others)))

    async def _limited(self, node: EngineNode, answer: Awaitable[T]) -> T:
        seconds = self.spec.answer_timeout_seconds
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError as e:
            raise WeightSyncError(f"the engine's host on {node.name} did not answer within {seconds:g} s") from e

    async def _watch_node(self, node: EngineNode) -> None:
        try:
            await node.ask(EngineHost.watch)
        except WorkerError as e:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._fail, LostEngineError(str(e)))


async def _wait_started(starts: Sequence[asyncio.Task[None]]) -> None:
    """Wait until all nodes have started, or raise the error of the node that made the start fail.

    If a scheduler is killed, those of other nodes fail after it, and may be noticed before it.
    """
    done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
    if all(start.exception() is None for start in done):
        return
    done, _ = await asyncio.wait(starts, timeout=ROOT_CAUSE_SECONDS)
    errors = [error for start in starts if start in done and (error := start.exception()) is not None]
    raise next((error for error in errors if isinstance(error, LostEngineError)), errors[0])


async def _shut_down(node: EngineNode) -> None:
    with suppress(WorkerError, TimeoutError):  # a host that has ended or hangs
        await asyncio.wait_for(node.shutdown(), NODE_SHUTDOWN_SECONDS)


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
    async def weight_needs(self) -> WeightNeeds:
        """Return `layouts` and the tensors that come in full, to be sent; raises as `layouts`."""
        traces = await self.traces()
        layouts = share_tensors([trace.layout for trace in traces])
        return WeightNeeds(layouts=tuple(layouts), full_tensors=full_tensors(traces))

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
        await self._weights.join_trainer(transfer_spec, engine, transfer_group)

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
