"""The nodes of a launch: what all of them do, the workers, and rank 0, which starts Ray's head and runs the command.

    rank 0     listen -> all nodes connected -> start Ray's head -> all nodes joined -> run the command -> stop all
    others     find the head -------------------> start Ray and join ---------------------------> stop on End

Every process of a launch is a descendant of this process, and none is left when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import override

from megarl import __version__
from megarl.cluster.launch.connection import (
    Connection,
    ConnectionLostError,
    End,
    Failed,
    Hello,
    Joined,
    Stop,
    Welcome,
    decode,
    derive_ray_token,
    encode,
    make_nonce,
)
from megarl.cluster.launch.node_world import NodeWorld, find_node_labels, query_nvlink_domain
from megarl.cluster.launch.ray_node import RayNode, make_interface_environment, make_ray_arguments, make_ray_environment
from megarl.cluster.launch.rendezvous import Peer, Rendezvous, find_addresses, find_head
from megarl.cluster.process.child_processes import ChildProcess, ChildProcesses, run_as_subreaper
from megarl.cluster.process.ports import find_unused_port
from megarl.cluster.process.process_start import STARTED_VARIABLE, process_creation_time
from megarl.errors import ConfigError, LaunchError

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNAL_EXIT_CODE_BASE = 128
"""The exit code of a process ended by signal N is this plus N, as in a shell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of `megarl launch` that concern this node."""

    join_timeout: float = 60.0
    """Seconds to wait for all nodes to connect."""
    node_timeout: float = 30.0
    """Seconds without a message after which a node counts as lost."""
    cpus: int
    """Number of CPU slots that Ray gets on this node."""
    gpus: int | None = None
    """Number of GPUs that Ray gets on this node; None: all that Ray finds."""
    labels: dict[str, str]
    """Ray labels of this node, added to those that the launch sets."""
    node_address: str | None = None
    """Address at which other nodes reach this one; None: derived from the connection to the head."""


class LaunchNode(ABC):
    """Common base of `HeadNode` and `WorkerNode`: owns the Ray node, the signal handlers and the outcome.

    Args:
        own_hello: message in which this node describes itself.
        notify: prints a progress line for the user.
    """

    def __init__(
        self, world: NodeWorld, options: LaunchOptions, own_hello: Hello, notify: Callable[[str], None]
    ) -> None:
        self.world = world
        self.own_hello = own_hello
        self.options = options
        self.notify = notify
        self.environment: Mapping[str, str] = dict(os.environ)
        self.outcome: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        """Exit code of the run, and what aborted it if anything did."""
        self.children = ChildProcesses()
        self._nvlink_domain = asyncio.create_task(query_nvlink_domain(self.children))
        self.ray = RayNode(self.children, make_ray_environment(self.environment, has_secret=bool(world.secret)))

    async def run(self) -> End:
        """Execute this node's role and shut the node down; return the outcome of the run."""
        loop = asyncio.get_running_loop()
        for number in TERMINATION_SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:  # nohup
                continue
            loop.add_signal_handler(number, self.on_terminate, number)
        loop.add_signal_handler(signal.SIGUSR1, self.on_time_limit)
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        work = asyncio.create_task(self.execute())
        work.add_done_callback(self._on_executed)
        try:
            return await self.outcome
        finally:
            work.cancel()
            await self.shutdown()
            self._nvlink_domain.cancel()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @abstractmethod
    async def execute(self) -> None:
        """Connect to the other nodes, start Ray, and wait until the run ends."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End this node's processes and close its connections."""

    @abstractmethod
    def on_terminate(self, number: int) -> None:
        """Handle signal `number`, one of `TERMINATION_SIGNALS`."""

    @abstractmethod
    def on_time_limit(self) -> None:
        """Handle SIGUSR1: the time limit of the job is near."""

    def finish(self, exit_code: int, reason: str | None = None) -> None:
        """Set the outcome of the run; calls after the first have no effect."""
        if not self.outcome.done():
            self.outcome.set_result(End(exit_code, reason))

    async def start_ray(self, ray_address: str, node_address: str, ray_nonce: str) -> None:
        """Start Ray on this node and return when the node has joined the cluster.

        Args:
            ray_nonce: number from which Ray's token is derived.

        Raises:
            LaunchError: Ray did not start.
        """
        labels = find_node_labels(self.world, await self._nvlink_domain) | self.options.labels
        arguments = make_ray_arguments(
            rank=self.world.rank,
            node_address=node_address,
            ray_address=ray_address,
            cpus=self.options.cpus,
            gpus=self.options.gpus,
            labels=labels,
        )
        await self.ray.start(arguments, self.make_cluster_environment(node_address, ray_nonce))

    def make_cluster_environment(self, node_address: str, ray_nonce: str) -> dict[str, str]:
        """Return the variables of Ray's processes and of the command that depend on the rendezvous."""
        return make_interface_environment(node_address, self.environment) | make_ray_token_environment(
            self.world, self.environment, ray_nonce
        )

    def _on_executed(self, work: asyncio.Task[None]) -> None:
        error = None if work.cancelled() else work.exception()
        if isinstance(error, LaunchError):
            self.finish(error.exit_code, str(error))
        elif error is not None and not self.outcome.done():
            self.outcome.set_exception(error)


def make_hello(world: NodeWorld, options: LaunchOptions) -> Hello:
    """Return the message in which this node describes itself to the head.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        ray = version("ray")
    except PackageNotFoundError as e:
        raise ConfigError(f"launch needs the package ray, which is not installed on node {world.host}") from e
    return Hello(
        rank=world.rank,
        size=world.size,
        host=world.host,
        address=options.node_address,
        versions={"megarl": __version__, "ray": ray, "Python": python_version()},
    )


def make_ray_token_environment(world: NodeWorld, environment: Mapping[str, str], ray_nonce: str) -> dict[str, str]:
    """Return the variable with Ray's token; empty if there is no secret, or if the user has set RAY_AUTH_MODE."""
    if not world.secret or "RAY_AUTH_MODE" in environment:
        return {}
    return {"RAY_AUTH_TOKEN": derive_ray_token(world, ray_nonce)}


class WorkerNode(LaunchNode):
    """A node of a rank other than 0; follows the messages of the head."""

    _connection: Connection | None = None

    @override
    async def execute(self) -> None:
        self._connection, answer = await find_head(
            self.world,
            self.own_hello,
            join_timeout=self.options.join_timeout,
            node_timeout=self.options.node_timeout,
        )
        if isinstance(answer, End):
            self.finish(answer.exit_code)
            return
        listening = asyncio.create_task(self._listen(self._connection))
        try:
            await self.start_ray(answer.ray_address, answer.node_address, answer.ray_nonce)
            self.notify(f"{self.world.host}: joined {answer.ray_address} as {answer.node_address}")
            self._connection.send(Joined())
            self._connection.send(Failed(await self.ray.wait_until_ended()))
        except LaunchError as e:
            self._connection.send(Failed(str(e)))
        await listening  # the head decides the outcome

    @override
    async def shutdown(self) -> None:
        await self.ray.stop()
        if self._connection is not None:
            await self._connection.close()

    @override
    def on_terminate(self, number: int) -> None:
        """Forward the request to the head, which ends the run; finish at once if the head was not found yet."""
        if self._connection is None:
            self.finish(SIGNAL_EXIT_CODE_BASE + number)
        else:
            self._connection.send(Stop(number))

    @override
    def on_time_limit(self) -> None:
        """Do nothing: the head gets the signal too."""

    async def _listen(self, connection: Connection) -> None:
        here = f"node {self.world.host} (rank {self.world.rank})"
        try:
            message = await connection.receive()
        except ConnectionLostError as e:
            self.finish(
                LaunchError.exit_code,
                f"{here}: lost the head {connection.remote_address}: {e}; this node was stopped",
            )
            return
        if isinstance(message, End):
            self.finish(message.exit_code)  # the head reports the reason
        else:
            self.finish(LaunchError.exit_code, f"{here}: unexpected {message} from the head; this node was stopped")


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
