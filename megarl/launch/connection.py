"""Connection between two nodes, with heartbeats that detect the loss of the other end."""

from __future__ import annotations

import asyncio
import contextlib

from megarl.launch.protocol import Heartbeat, Message, decode, encode

HEARTBEATS_PER_TIMEOUT = 6
MAX_HEARTBEAT_INTERVAL_SECONDS = 5.0
CLOSE_TIMEOUT_SECONDS = 2.0
"""Time limit for closing a connection whose other end may be lost."""


class ConnectionLostError(Exception):
    """The connection to the other node is lost; the message states how this was detected."""


class Connection:
    """Message stream to and from another node; sends heartbeats in the background.

    Args:
        timeout_seconds: silence of the other end after which the connection counts as lost.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_seconds: float) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout = timeout_seconds
        self.local_address: str = writer.get_extra_info("sockname")[0]
        self.remote_address: str = writer.get_extra_info("peername")[0]
        self._heartbeat_task = asyncio.get_running_loop().create_task(self._send_heartbeats())

    def send(self, message: Message) -> None:
        """Queue a message for sending; a lost connection is reported by `receive`, not here."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> Message:
        """Return the next message that is not a heartbeat.

        Raises:
            ConnectionLostError: the connection is closed, broken or silent, or the line is not a message.
        """
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readline(), self._timeout)
            except TimeoutError:
                raise ConnectionLostError(f"no message for {self._timeout:g} s") from None
            except ConnectionResetError:  # the peer closed its socket while data was under way
                raise ConnectionLostError("the connection was closed unexpectedly") from None
            except OSError as e:
                raise ConnectionLostError(f"the connection failed: {e}") from e
            except ValueError as e:  # the line exceeds the limit of the reader
                raise ConnectionLostError(str(e)) from e
            if not line.endswith(b"\n"):
                raise ConnectionLostError("the connection was closed unexpectedly")
            try:
                message = decode(line)
            except ValueError as e:
                raise ConnectionLostError(str(e)) from e
            if not isinstance(message, Heartbeat):
                return message

    async def close(self) -> None:
        """Flush pending messages for at most `CLOSE_TIMEOUT_SECONDS`, then close the connection."""
        self._heartbeat_task.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_TIMEOUT_SECONDS)
        self._writer.transport.abort()

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(min(MAX_HEARTBEAT_INTERVAL_SECONDS, self._timeout / HEARTBEATS_PER_TIMEOUT))
            self.send(Heartbeat())
