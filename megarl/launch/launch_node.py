"""What `megarl launch` does on a node, from meeting the others to the last process's end.

    rank 0     listen -> all are there -> Ray's head is up -> all have joined -> the command -> everybody ends
    others     find the head ----------------> Ray is up, joined -------------------> end when told

Every process that comes of it is a descendant of this one, and none is left when it ends.
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

from megarl import __version__
from megarl.errors import ConfigError, LaunchError
from megarl.launch.node_labels import nvlink_domain, own_labels
from megarl.launch.node_world import NodeWorld
from megarl.launch.protocol import End, Hello
from megarl.launch.ray_node import RayNode, interface_environment, ray_arguments, ray_environment
from megarl.process.child_processes import Children
from megarl.process.startup_trace import STARTED, process_created

TOLD_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNALLED = 128
"""What a signal ended counts as this and the signal's number, as with shells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The user's wishes."""

    join_timeout: float = 60.0
    """Seconds that nodes wait for each other."""
    node_timeout: float = 30.0
    """Seconds after which a node that is not heard of is lost."""
    cpus: int
    """CPU slots of this node."""
    gpus: int | None = None
    """None: those that Ray finds."""
    labels: dict[str, str]
    node_address: str | None = None
    """Where this node is to be reached."""


class Agent(ABC):
    """What the head and the others have in common: a Ray node, signals, and an end.

    Args:
        own: what this node says of itself.
        say: shows a line to the user.
    """

    def __init__(self, world: NodeWorld, options: LaunchOptions, own: Hello, say: Callable[[str], None]) -> None:
        self.world = world
        self.own = own
        self.options = options
        self.say = say
        self.environment: Mapping[str, str] = dict(os.environ)
        self.end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        """How the run ended."""
        self.children = Children()
        self._nvlink_domain = asyncio.create_task(nvlink_domain(self.children))
        self.ray = RayNode(self.children, self.environment)

    async def run(self) -> End:
        """How the run ended; this node's part of it has ended too."""
        loop = asyncio.get_running_loop()
        for number in TOLD_TO_END:
            if signal.getsignal(number) is signal.SIG_IGN:  # nohup
                continue
            loop.add_signal_handler(number, self.told_to_end, number)
        loop.add_signal_handler(signal.SIGUSR1, self.told_of_time)
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        work = asyncio.create_task(self.work())
        work.add_done_callback(self._worked)
        try:
            return await self.end
        finally:
            work.cancel()
            await self.leave()
            self._nvlink_domain.cancel()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @abstractmethod
    async def work(self) -> None:
        """Meet the others, start Ray, and stay until the run ends."""

    @abstractmethod
    async def leave(self) -> None:
        """End this node's processes, and let the others know."""

    @abstractmethod
    def told_to_end(self, number: int) -> None:
        """A signal asks for the end."""

    @abstractmethod
    def told_of_time(self) -> None:
        """SIGUSR1: the time limit is near."""

    def finish(self, exit_code: int, reason: str | None = None) -> None:
        """The run is over; only the first call counts."""
        if not self.end.done():
            self.end.set_result(End(exit_code, reason))

    async def start_ray(self, ray_address: str, node_address: str) -> None:
        """Return when this node is one of Ray's.

        Raises:
            LaunchError: Ray did not start.
        """
        labels = own_labels(self.world, await self._nvlink_domain) | self.options.labels
        arguments = ray_arguments(
            rank=self.world.rank,
            node_address=node_address,
            ray_address=ray_address,
            cpus=self.options.cpus,
            gpus=self.options.gpus,
            labels=labels,
        )
        await self.ray.start(arguments, interface_environment(node_address, self.environment))

    def _worked(self, work: asyncio.Task[None]) -> None:
        error = None if work.cancelled() else work.exception()
        if isinstance(error, LaunchError):
            self.finish(error.exit_code, str(error))
        elif error is not None and not self.end.done():
            self.end.set_exception(error)


def hello(world: NodeWorld, options: LaunchOptions) -> Hello:
    """What this node says of itself.

    Raises:
        ConfigError: it has no Ray.
    """
    try:
        ray = version("ray")
    except PackageNotFoundError as e:
        raise ConfigError(f"launch needs the package ray, got none on node {world.host}") from e
    return Hello(
        token=world.token,
        rank=world.rank,
        size=world.size,
        host=world.host,
        address=options.node_address,
        versions={"megarl": __version__, "ray": ray, "Python": python_version()},
    )


def command_environment(environment: Mapping[str, str], ray_address: str, node_address: str) -> dict[str, str]:
    """What the command finds in its environment."""
    interfaces = interface_environment(node_address, environment)
    started = {STARTED: environment.get(STARTED, str(process_created()))}
    return ray_environment(environment) | interfaces | started | {"RAY_ADDRESS": ray_address}
