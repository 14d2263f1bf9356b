"""All ranks but 0: a Ray node that ends with the run."""

from __future__ import annotations

import asyncio

from megarl.errors import LaunchError
from megarl.launch.connection import Link, LinkLostError
from megarl.launch.launch_node import SIGNALLED, Agent
from megarl.launch.protocol import End, Failed, Joined, Stop
from megarl.launch.rendezvous import find_head


class Follower(Agent):
    """A node that is led."""

    _link: Link | None = None

    async def work(self) -> None:
        """See `Agent.work`."""
        self._link, answer = await find_head(
            self.world,
            self.own,
            join_timeout=self.options.join_timeout,
            node_timeout=self.options.node_timeout,
        )
        if isinstance(answer, End):
            self.finish(answer.exit_code)
            return
        listening = asyncio.create_task(self._listen(self._link))
        try:
            await self.start_ray(answer.ray_address, answer.node_address)
            self.say(f"{self.world.host}: joined {answer.ray_address} as {answer.node_address}")
            self._link.send(Joined())
            self._link.send(Failed(await self.ray.lost()))
        except LaunchError as e:
            self._link.send(Failed(str(e)))
        await listening  # the head has the last word

    async def leave(self) -> None:
        """See `Agent.leave`."""
        await self.ray.stop()
        if self._link is not None:
            await self._link.close()

    def told_to_end(self, number: int) -> None:
        """See `Agent.told_to_end`; the head decides, unless it was not found yet."""
        if self._link is None:
            self.finish(SIGNALLED + number)
        else:
            self._link.send(Stop(number))

    def told_of_time(self) -> None:
        """See `Agent.told_of_time`; the head is told too."""

    async def _listen(self, link: Link) -> None:
        try:
            message = await link.receive()
        except LinkLostError as e:
            here = f"node {self.world.host} (rank {self.world.rank})"
            self.finish(
                LaunchError.exit_code, f"{here}: the head, {link.remote_address}: {e}; this node has ended its part"
            )
        else:
            assert isinstance(message, End), message
            self.finish(message.exit_code)  # the head says why
