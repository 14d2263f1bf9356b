"""Entry point of `megarl launch` on one node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from megarl.errors import LaunchError
from megarl.launch.head_node import HeadNode
from megarl.launch.launch_node import LaunchOptions, make_hello
from megarl.launch.node_world import NodeWorld
from megarl.launch.protocol import End, Hello, decode, encode
from megarl.launch.worker_node import WorkerNode
from megarl.process.subreaper import run_as_subreaper


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
