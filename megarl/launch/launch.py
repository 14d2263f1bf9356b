"""One node's part of a run, from the first process to the last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from megarl.errors import LaunchError
from megarl.launch.head_node import Head
from megarl.launch.launch_node import LaunchOptions, hello
from megarl.launch.node_world import NodeWorld
from megarl.launch.protocol import End, Hello, decode, encode
from megarl.launch.worker_node import Follower
from megarl.process.subreaper import keep


def launch(world: NodeWorld, options: LaunchOptions, command: Sequence[str], *, say: Callable[[str], None]) -> int:
    """Run a command on Ray over all nodes, each of which calls this; returns the command's exit code.

    Args:
        command: program and arguments; they run on rank 0, with RAY_ADDRESS in their environment.
        say: shows a line to the user.

    Raises:
        ConfigError: this node has no Ray.
        LaunchError: the nodes did not meet, Ray did not start, or a node was lost.
    """
    own = hello(world, options)
    said, code = keep(lambda: encode(asyncio.run(_run(world, options, own, command, say))))
    if code:
        raise LaunchError(f"node {world.host} (rank {world.rank}): its launcher ended with exit code {code}")
    end = decode(said)
    assert isinstance(end, End), end
    if end.reason is not None:
        raise LaunchError(end.reason)
    return end.exit_code


async def _run(
    world: NodeWorld, options: LaunchOptions, own: Hello, command: Sequence[str], say: Callable[[str], None]
) -> End:
    agent = Follower(world, options, own, say) if world.rank else Head(world, options, own, say, command)
    return await agent.run()
