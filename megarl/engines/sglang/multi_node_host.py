"""Hosts an engine whose TP ranks are on several nodes.

    node 0: MultiNodeHost                                 other nodes: an EngineHost in another process each
    tokenizer manager, TP ranks 0 ... n-1                 TP ranks n ...
      |        '-- torch.distributed: requests, commands, activations --'
      '-- EngineNode.ask: start, watch, replies of the TP ranks, files for them, shutdown

SGLang itself sends requests and commands from TP rank 0 to the others. Files that TP ranks exchange with the engine's
host go through the host of their node. The engine is lost once a scheduler process or a host is lost on any node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang.engine_host import EngineHost
from megarl.engines.sglang.weight_update.messages import Reply
from megarl.engines.sglang.weight_update.rank_files import ReplyState
from megarl.errors import LostEngineError, WeightSyncError, WorkerError

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
