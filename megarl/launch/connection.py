"""A connection between two nodes that knows when the other end is gone."""

from __future__ import annotations

import asyncio
import contextlib

from megarl.launch.protocol import Beat, Message, decode, encode

BEATS_PER_TIMEOUT = 6
LONGEST_BEAT_SECONDS = 5.0
CLOSE_SECONDS = 2.0
"""How long a lost node may hold up the end."""


class LinkLostError(Exception):
    """The other end is gone; says how that was noticed."""


class Link:
    """Messages to and from another node, with beats in between.

    Args:
        timeout_seconds: how long the other end may be silent.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_seconds: float) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout = timeout_seconds
        self.local_address: str = writer.get_extra_info("sockname")[0]
        self.remote_address: str = writer.get_extra_info("peername")[0]
        self._beats = asyncio.get_running_loop().create_task(self._beat())

    def send(self, message: Message) -> None:
        """Hand a message to the system; that the other end is gone is for `receive` to notice."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> Message:
        """The next message that is not a beat.

        Raises:
            LinkLostError: there will be none.
        """
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readline(), self._timeout)
            except TimeoutError:
                raise LinkLostError(f"not heard of for {self._timeout:g} s") from None
            except OSError as e:
                raise LinkLostError(f"the connection broke: {e}") from e
            except ValueError as e:  # a line beyond all bounds
                raise LinkLostError(str(e)) from e
            if not line.endswith(b"\n"):
                raise LinkLostError("it ended without a word")
            try:
                message = decode(line)
            except ValueError as e:
                raise LinkLostError(str(e)) from e
            if not isinstance(message, Beat):
                return message

    async def close(self) -> None:
        """Send what is left, as far as the other end takes it, and hang up."""
        self._beats.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_SECONDS)
        self._writer.transport.abort()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(min(LONGEST_BEAT_SECONDS, self._timeout / BEATS_PER_TIMEOUT))
            self.send(Beat())
