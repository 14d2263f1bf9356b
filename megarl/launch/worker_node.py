"""Ranks other than 0 of a launch: nodes that join Ray and stop when the run ends."""

from __future__ import annotations

import asyncio
from typing import override

from megarl.errors import LaunchError
from megarl.launch.connection import Connection, ConnectionLostError
from megarl.launch.launch_node import SIGNAL_EXIT_CODE_BASE, LaunchNode
from megarl.launch.protocol import End, Failed, Joined, Stop
from megarl.launch.rendezvous import find_head


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
