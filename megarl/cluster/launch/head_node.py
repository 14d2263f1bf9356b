"""Rank 0 of a launch: accepts the worker nodes, starts Ray's head, and runs the command."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import override

from megarl.cluster.launch.connection import (
    ConnectionLostError,
    End,
    Failed,
    Hello,
    Joined,
    Stop,
    Welcome,
    decode,
    encode,
    make_nonce,
)
from megarl.cluster.launch.launch_node import SIGNAL_EXIT_CODE_BASE, LaunchNode, LaunchOptions, WorkerNode, make_hello
from megarl.cluster.launch.node_world import NodeWorld
from megarl.cluster.launch.ray_node import make_ray_environment
from megarl.cluster.launch.rendezvous import Peer, Rendezvous, find_addresses
from megarl.cluster.process.child_processes import ChildProcess, run_as_subreaper
from megarl.cluster.process.ports import find_unused_port
from megarl.cluster.process.startup_trace import STARTED_VARIABLE, process_creation_time
from megarl.errors import LaunchError

COMMAND_GRACE_SECONDS = 20.0
"""Time from SIGTERM to SIGKILL for the command."""
REPEATED_SIGNAL_SECONDS = 0.5
"""A termination signal this long after the first one kills the command; an earlier one is a duplicate."""
PEERS_GRACE_SECONDS = 6.0
"""Time for the worker nodes to stop; with `COMMAND_GRACE_SECONDS` it stays below the 30 s of Slurm and torchrun."""


class HeadNode(LaunchNode):
    """The node of rank 0.

    Args:
        command: program and arguments of the command, which runs on this node.
    """

    def __init__(
        self,
        world: NodeWorld,
        options: LaunchOptions,
        own_hello: Hello,
        notify: Callable[[str], None],
        command: Sequence[str],
    ) -> None:
        super().__init__(world, options, own_hello, notify)
        self._command_line = command
        self._command: ChildProcess | None = None
        self._termination_requested_at: float | None = None
        self._termination_task: asyncio.Task[None] | None = None
        self._is_time_limit_near = False
        self._rendezvous = Rendezvous(world, own_hello, options.node_timeout)
        self._peers: list[Peer] = []
        self._joined_ranks: set[int] = set()
        self._lost_ranks: set[int] = set()
        self._all_joined = asyncio.Event()
        self._watch_tasks: list[asyncio.Task[None]] = []

    @override
    async def execute(self) -> None:
        started = time.monotonic()
        if self.world.size > 1:
            await self._rendezvous.listen()
        self._peers = await self._rendezvous.wait_for_peers(self.options.join_timeout)
        self._watch_tasks = [asyncio.create_task(self._watch(peer)) for peer in self._peers]
        own_address, other_addresses = find_addresses(self._peers, self.options.node_address)
        names = [f"{self.world.host} ({own_address})"]
        names += [f"{peer.hello.host} ({address})" for peer, address in zip(self._peers, other_addresses, strict=True)]
        started = self._report_phase("nodes connected", started, ", ".join(names))

        ray_address = f"{own_address}:{find_unused_port()}"
        ray_nonce = make_nonce()
        try:
            await self.start_ray(ray_address, own_address, ray_nonce)
        except LaunchError as e:
            raise LaunchError(f"node {self.world.host} (rank 0): {e}") from e
        self._watch_tasks.append(asyncio.create_task(self._watch_ray()))
        started = self._report_phase("Ray head started", started, ray_address)

        for peer, address in zip(self._peers, other_addresses, strict=True):
            peer.connection.send(Welcome(ray_address=ray_address, node_address=address, ray_nonce=ray_nonce))
        if self._peers:
            await self._all_joined.wait()
            self._report_phase("Ray nodes joined", started, f"{self.world.size} nodes")
        await self._run_command({"RAY_ADDRESS": ray_address, **self.make_cluster_environment(own_address, ray_nonce)})

    @override
    async def shutdown(self) -> None:
        await self._terminate_command()
        for watch in self._watch_tasks:
            watch.cancel()
        await asyncio.gather(*self._watch_tasks, return_exceptions=True)
        end = (
            self.outcome.result() if self.outcome.exception() is None else End(1, f"{self.world.host} (rank 0) failed")
        )
        peers = self._rendezvous.peers
        for peer in peers:
            peer.connection.send(end)
        await asyncio.gather(self.ray.stop(), *(self._drain(peer) for peer in peers))
        await self._rendezvous.close()

    @override
    def on_terminate(self, number: int) -> None:
        """Terminate the command gracefully; at the second request, kill it."""
        now = time.monotonic()
        if self._termination_requested_at is None:
            self._termination_requested_at = now
            self._end_gracefully(number)
        # one request may arrive twice: some senders signal the process, others its descendants too
        elif now - self._termination_requested_at > REPEATED_SIGNAL_SECONDS and self._command is not None:
            self._command.signal(signal.SIGKILL)

    @override
    def on_time_limit(self) -> None:
        """Forward SIGUSR1 to the command, now or as soon as it starts."""
        self._is_time_limit_near = True
        if self._command is not None:
            self._command.signal(signal.SIGUSR1)

    def _report_phase(self, name: str, started: float, details: str) -> float:
        now = time.monotonic()
        self.notify(f"{name:<18} {now - started:5.1f} s  {details}")
        return now

    async def _run_command(self, cluster_environment: dict[str, str]) -> None:
        environment = make_ray_environment(self.environment, has_secret=bool(self.world.secret)) | cluster_environment
        environment.setdefault(STARTED_VARIABLE, str(process_creation_time()))
        self._command = self.children.start(self._command_line, environment, parent_death_signal=signal.SIGKILL)
        if self._is_time_limit_near:
            self._command.signal(signal.SIGUSR1)
        code = await asyncio.shield(self._command.ended)
        self.finish(code if code >= 0 else SIGNAL_EXIT_CODE_BASE - code)

    def _end_gracefully(self, number: int) -> None:
        if self._command is None:
            self.finish(SIGNAL_EXIT_CODE_BASE + number)
        elif self._termination_task is None:
            self._termination_task = asyncio.create_task(self._terminate_command())

    async def _terminate_command(self) -> None:
        if self._command is not None:
            await self._command.terminate(COMMAND_GRACE_SECONDS)

    async def _watch(self, peer: Peer) -> None:
        while True:
            try:
                message = await peer.connection.receive()
            except ConnectionLostError as e:
                self._lost_ranks.add(peer.hello.rank)
                self.finish(LaunchError.exit_code, f"{peer}: {e}; the run was aborted")
                return
            match message:
                case Joined():
                    self._joined_ranks.add(peer.hello.rank)
                    if len(self._joined_ranks) == len(self._peers):
                        self._all_joined.set()
                case Failed(reason):
                    self.finish(LaunchError.exit_code, f"{peer}: {reason}\nthe run was aborted")
                    return
                case Stop(number):
                    self._end_gracefully(number)  # Slurm signals every node: this is not a second request
                case _:
                    self.finish(LaunchError.exit_code, f"{peer}: unexpected {message}; the run was aborted")
                    return

    async def _watch_ray(self) -> None:
        reason = await self.ray.wait_until_ended()
        self.finish(LaunchError.exit_code, f"node {self.world.host} (rank 0): {reason}\nthe run was aborted")

    async def _drain(self, peer: Peer) -> None:
        """Wait until the node closes the connection, which it does after its processes have ended."""
        with contextlib.suppress(ConnectionLostError, TimeoutError):
            async with asyncio.timeout(PEERS_GRACE_SECONDS):
                while peer.hello.rank not in self._lost_ranks:
                    await peer.connection.receive()
        await peer.connection.close()


def launch(world: NodeWorld, options: LaunchOptions, command: Sequence[str], *, notify: Callable[[str], None]) -> int:
    """Form a Ray cluster of all nodes, run a command on it, and return its exit code; every node calls this.

    Args:
        command: program and arguments; run on rank 0 with RAY_ADDRESS in the environment.
        notify: prints a progress line for the user.

    Raises:
        ConfigError: Ray is not installed on this node.
        LaunchError: a node did not join, Ray did not start, or a node was lost.
    """
    own_hello = make_hello(world, options)
    result, code = run_as_subreaper(lambda: encode(asyncio.run(_run(world, options, own_hello, command, notify))))
    if code:
        raise LaunchError(f"node {world.host} (rank {world.rank}): its launcher exited with code {code}")
    end = decode(result)
    assert isinstance(end, End), end
    if end.reason is not None:
        raise LaunchError(end.reason)
    return end.exit_code


async def _run(
    world: NodeWorld, options: LaunchOptions, own_hello: Hello, command: Sequence[str], notify: Callable[[str], None]
) -> End:
    node = (
        WorkerNode(world, options, own_hello, notify)
        if world.rank
        else HeadNode(world, options, own_hello, notify, command)
    )
    return await node.run()
