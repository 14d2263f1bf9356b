"""Authenticated connection between two nodes, with heartbeats that detect the loss of the other end."""

from __future__ import annotations

import asyncio
import contextlib
import hmac

from megarl.launch.protocol import Heartbeat, Message, decode, encode

HEARTBEATS_PER_TIMEOUT = 6
MAX_HEARTBEAT_INTERVAL_SECONDS = 5.0
CLOSE_TIMEOUT_SECONDS = 2.0
"""Time limit for closing a connection whose other end may be lost."""


class ConnectionLostError(Exception):
    """The connection to the other node is lost; the message states how this was detected."""


class MessageTags:
    """Authentication tags of the messages that travel in one direction of a connection.

    A line is `TAG MESSAGE`, where the tag is an HMAC-SHA256 of the message and of its number.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._num_messages = 0

    def add(self, message: bytes) -> bytes:
        """Return the line of the next message to send."""
        return self._next_tag(message) + b" " + message

    def check(self, line: bytes) -> bytes:
        """Return the message in the next line received.

        Raises:
            ConnectionLostError: the tag is wrong.
        """
        tag, _, message = line.partition(b" ")
        if not hmac.compare_digest(tag, self._next_tag(message)):
            raise ConnectionLostError("a message has a wrong authentication tag")
        return message

    def _next_tag(self, message: bytes) -> bytes:
        number = self._num_messages.to_bytes(8, "big")
        self._num_messages += 1
        return hmac.digest(self._key, number + message, "sha256").hex().encode()


async def read_message(reader: asyncio.StreamReader, tags: MessageTags | None = None) -> Message:
    """Return the next message; `tags` check its authentication tag, None reads a message without a tag.

    Raises:
        ConnectionLostError: the connection is closed or broken, or the line is not a message with the right tag.
    """
    try:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise ConnectionLostError("the connection was closed unexpectedly")
        return decode(line if tags is None else tags.check(line))
    except ConnectionResetError:  # the peer closed its socket while data was under way
        raise ConnectionLostError("the connection was closed unexpectedly") from None
    except OSError as e:
        raise ConnectionLostError(f"the connection failed: {e}") from e
    except ValueError as e:  # not a message, or a line that exceeds the limit of the reader
        raise ConnectionLostError(str(e)) from e


async def close_writer(writer: asyncio.StreamWriter) -> None:
    """Flush pending data for at most `CLOSE_TIMEOUT_SECONDS`, then close the connection."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), CLOSE_TIMEOUT_SECONDS)
    writer.transport.abort()


class Connection:
    """Message stream to and from another node; sends heartbeats in the background.

    Args:
        timeout_seconds: silence of the other end after which the connection counts as lost.
        send_key: key of the tags of outgoing messages.
        receive_key: key of the tags of incoming messages.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        timeout_seconds: float,
        *,
        send_key: bytes,
        receive_key: bytes,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout = timeout_seconds
        self._outgoing = MessageTags(send_key)
        self._incoming = MessageTags(receive_key)
        self.local_address: str = writer.get_extra_info("sockname")[0]
        self.remote_address: str = writer.get_extra_info("peername")[0]
        self._heartbeat_task = asyncio.get_running_loop().create_task(self._send_heartbeats())

    def send(self, message: Message) -> None:
        """Queue a message for sending; a lost connection is reported by `receive`, not here."""
        if not self._writer.is_closing():
            self._writer.write(self._outgoing.add(encode(message)))

    async def receive(self) -> Message:
        """Return the next message that is not a heartbeat.

        Raises:
            ConnectionLostError: the connection is closed, broken or silent, or a line is not a message with its tag.
        """
        while True:
            try:
                message = await asyncio.wait_for(read_message(self._reader, self._incoming), self._timeout)
            except TimeoutError:
                raise ConnectionLostError(f"no message for {self._timeout:g} s") from None
            if not isinstance(message, Heartbeat):
                return message

    async def close(self) -> None:
        """Flush pending messages for at most `CLOSE_TIMEOUT_SECONDS`, then close the connection."""
        self._heartbeat_task.cancel()
        await close_writer(self._writer)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(min(MAX_HEARTBEAT_INTERVAL_SECONDS, self._timeout / HEARTBEATS_PER_TIMEOUT))
            self.send(Heartbeat())
