"""Rank 0: where the others come to, and where the command runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence

from megarl.errors import LaunchError
from megarl.launch.connection import LinkLostError
from megarl.launch.launch_node import SIGNALLED, Agent, LaunchOptions, command_environment
from megarl.launch.node_world import NodeWorld
from megarl.launch.protocol import End, Failed, Hello, Joined, Stop, Welcome
from megarl.launch.ray_node import free_port
from megarl.launch.rendezvous import Meeting, Peer, addresses
from megarl.process.child_processes import Child

COMMAND_END_SECONDS = 20.0
"""How long the command may take to end in order."""
IMPATIENCE_SECONDS = 0.5
"""A signal that comes so long after the first is a second request."""
PEERS_END_SECONDS = 6.0
"""How long the other nodes may take to end their parts: with the above, within the 30 s of Slurm and torchrun."""


class Head(Agent):
    """The node that leads.

    Args:
        command: program and arguments, which run here.
    """

    def __init__(
        self,
        world: NodeWorld,
        options: LaunchOptions,
        own: Hello,
        say: Callable[[str], None],
        command: Sequence[str],
    ) -> None:
        super().__init__(world, options, own, say)
        self._command_line = command
        self._command: Child | None = None
        self._told_at: float | None = None
        self._ending: asyncio.Task[None] | None = None
        self._time_is_near = False
        self._meeting = Meeting(world, own, options.node_timeout)
        self._peers: list[Peer] = []
        self._joined: set[int] = set()
        self._lost: set[int] = set()
        self._all_joined = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []

    async def work(self) -> None:
        """See `Agent.work`."""
        started = time.monotonic()
        await self._meeting.open()
        self._peers = await self._meeting.gather(self.options.join_timeout)
        self._watching = [asyncio.create_task(self._watch(peer)) for peer in self._peers]
        own, others = addresses(self._peers, self.options.node_address)
        names = [f"{self.world.host} ({own})"]
        names += [f"{peer.hello.host} ({address})" for peer, address in zip(self._peers, others, strict=True)]
        started = self._phase("nodes met", started, ", ".join(names))

        ray_address = f"{own}:{free_port()}"
        try:
            await self.start_ray(ray_address, own)
        except LaunchError as e:
            raise LaunchError(f"node {self.world.host} (rank 0): {e}") from e
        self._watching.append(asyncio.create_task(self._watch_ray()))
        started = self._phase("Ray up", started, ray_address)

        for peer, address in zip(self._peers, others, strict=True):
            peer.link.send(Welcome(ray_address=ray_address, node_address=address))
        if self._peers:
            await self._all_joined.wait()
            self._phase("Ray joined by all", started, f"{self.world.size} nodes")
        await self._run_command(ray_address, own)

    async def leave(self) -> None:
        """See `Agent.leave`."""
        await self._end_command()
        for watch in self._watching:
            watch.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        end = self.end.result() if self.end.exception() is None else End(1, f"{self.world.host} (rank 0) failed")
        peers = self._meeting.peers
        for peer in peers:
            peer.link.send(end)
        await asyncio.gather(self.ray.stop(), *(self._see_off(peer) for peer in peers))
        await self._meeting.close()

    def told_to_end(self, number: int) -> None:
        """See `Agent.told_to_end`; the command ends in order, at the second time at once."""
        now = time.monotonic()
        if self._told_at is None:
            self._told_at = now
            self._end_in_order(number)
        # a request may come twice: some send it to a process, some to its descendants too
        elif now - self._told_at > IMPATIENCE_SECONDS and self._command is not None:
            self._command.signal(signal.SIGKILL)

    def told_of_time(self) -> None:
        """See `Agent.told_of_time`; the command's business."""
        self._time_is_near = True
        if self._command is not None:
            self._command.signal(signal.SIGUSR1)

    def _phase(self, name: str, started: float, what: str) -> float:
        now = time.monotonic()
        self.say(f"{name:<18} {now - started:5.1f} s  {what}")
        return now

    async def _run_command(self, ray_address: str, own: str) -> None:
        environment = command_environment(self.environment, ray_address, own)
        self._command = self.children.start(self._command_line, environment, when_parent_dies=signal.SIGKILL)
        if self._time_is_near:
            self._command.signal(signal.SIGUSR1)
        code = await asyncio.shield(self._command.ended)
        self.finish(code if code >= 0 else SIGNALLED - code)

    def _end_in_order(self, number: int) -> None:
        if self._command is None:
            self.finish(SIGNALLED + number)
        elif self._ending is None:
            self._ending = asyncio.create_task(self._end_command())

    async def _end_command(self) -> None:
        if self._command is not None:
            await self._command.end(COMMAND_END_SECONDS)

    async def _watch(self, peer: Peer) -> None:
        while True:
            try:
                message = await peer.link.receive()
            except LinkLostError as e:
                self._lost.add(peer.hello.rank)
                self.finish(LaunchError.exit_code, f"{peer}: {e}; the run has been ended")
                return
            match message:
                case Joined():
                    self._joined.add(peer.hello.rank)
                    if len(self._joined) == len(self._peers):
                        self._all_joined.set()
                case Failed(reason):
                    self.finish(LaunchError.exit_code, f"{peer}: {reason}\nthe run has been ended")
                    return
                case Stop(number):
                    self._end_in_order(number)  # Slurm tells every node: no second time
                case _:
                    raise AssertionError(message)

    async def _watch_ray(self) -> None:
        reason = await self.ray.lost()
        self.finish(LaunchError.exit_code, f"node {self.world.host} (rank 0): {reason}\nthe run has been ended")

    async def _see_off(self, peer: Peer) -> None:
        """Wait for the node to hang up, which it does when its part has ended."""
        with contextlib.suppress(LinkLostError, TimeoutError):
            async with asyncio.timeout(PEERS_END_SECONDS):
                while peer.hello.rank not in self._lost:
                    await peer.link.receive()
        await peer.link.close()
