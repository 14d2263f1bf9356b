"""Base class of the nodes of a launch: lifecycle, signals and the Ray node.

    rank 0     listen -> all nodes connected -> start Ray's head -> all nodes joined -> run the command -> stop all
    others     find the head -------------------> start Ray and join ---------------------------> stop on End

Every process of a launch is a descendant of this process, and none is left when it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
    derive_ray_token,
)
from megarl.cluster.launch.node_world import NodeWorld, find_node_labels, query_nvlink_domain
from megarl.cluster.launch.ray_node import RayNode, make_interface_environment, make_ray_arguments, make_ray_environment
from megarl.cluster.launch.rendezvous import find_head
from megarl.cluster.process.child_processes import ChildProcesses
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
