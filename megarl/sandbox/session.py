"""The host's end of the connection to a sandbox."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from megarl.errors import SandboxError
from megarl.sandbox.guest.channel import LENGTH, encode_request

FENCE = "```"
LABELS = ("python", "python3", "py", "py3")


def find_code(text: str) -> str | None:
    """Return the last block labelled as Python; without one, the last block that has no label; None without both.

    A block begins behind a line that ends in backticks and a label, and ends at a line that begins or ends with
    backticks. Blocks of another label, and backticks within a line, are text. Takes time in proportion to the text.
    """
    labelled: str | None = None
    unlabelled: str | None = None
    label: str | None = None  # of the block that is open
    lines = list[str]()
    for line in text.split("\n"):
        stripped = line.strip()
        if label is not None and not stripped.startswith(FENCE) and not stripped.endswith(FENCE):
            lines.append(line)
            continue
        opened = _opened_label(stripped, is_inside=label is not None)
        if label is not None:
            if not stripped.startswith(FENCE):
                lines.append(line.rstrip().rstrip("`"))
            code = "".join(f"{each}\n" for each in lines)
            if label in LABELS:
                labelled = code
            elif not label:
                unlabelled = code
        label, lines = opened, []
    return unlabelled if labelled is None else labelled


def _opened_label(line: str, *, is_inside: bool) -> str | None:
    """Return the label, in lower case, of the block that begins behind a line; None: it begins none.

    Inside a block, backticks without a label end it. Behind other text, a label has no spaces.
    """
    before, fence, after = line.rpartition(FENCE)
    before, label = before.rstrip("`"), after.strip().lower()
    if not fence or FENCE in before or (is_inside and not label):
        return None
    if before.strip("> \t"):
        return label if not is_inside and len(label.split()) <= 1 else None
    return label.partition(" ")[0]


CLOSE_SECONDS = 30.0
"""Timeout in seconds for the processes of a killed sandbox to exit."""


class ReplyBuffer:
    """Splits bytes that arrive in pieces into replies."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: length of the longest reply."""
        self._data, self._max_bytes = bytearray(), max_bytes

    def add(self, data: bytes) -> None:
        """Append bytes that have arrived."""
        self._data += data

    def next(self) -> dict[str, Any] | None:
        """Return the next whole reply; None where more bytes are needed.

        Raises:
            ValueError: the reply is too long, or no JSON object.
        """
        if len(self._data) < LENGTH.size:
            return None
        length = LENGTH.unpack_from(self._data)[0]
        if length > self._max_bytes:
            raise ValueError(f"a reply needs to have at most {self._max_bytes} bytes, got {length}")
        if len(self._data) < LENGTH.size + length:
            return None
        body = bytes(self._data[LENGTH.size : LENGTH.size + length])
        del self._data[: LENGTH.size + length]
        try:
            reply = json.loads(body)
        except RecursionError as e:
            raise ValueError("a reply is nested too deeply") from e
        if not isinstance(reply, dict):
            raise ValueError(f"a reply needs to be a JSON object, got {type(reply).__name__}")  # noqa: TRY004
        return reply


class Session:
    """A sandbox that is running. Its requests block; one thread uses it at a time."""

    def __init__(self, channel: socket.socket, lifeline: socket.socket, *, max_reply_bytes: int) -> None:
        self._channel, self._lifeline = channel, lifeline
        self._replies = ReplyBuffer(max_reply_bytes)
        self._errors: str | None = None
        self._is_closed = False
        self.cpu_seconds = 0.0
        """CPU time of all processes of the sandbox, in seconds; known when it is closed."""

    def send(self, *requests: dict[str, Any], seconds: float) -> None:
        """Send requests; see `Runner.serve` for their kinds.

        Raises:
            TimeoutError: the sandbox did not take it in time.
            EOFError: the sandbox has ended.
        """
        try:
            self._channel.settimeout(seconds)
            self._channel.sendall(b"".join(map(encode_request, requests)))
        except TimeoutError:
            raise
        except OSError as e:
            raise EOFError from e

    def receive(self, *, seconds: float) -> dict[str, Any]:
        """Return the next reply.

        Raises:
            TimeoutError: it did not arrive in time.
            EOFError: the sandbox has ended.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                reply = self._replies.next()
            except ValueError as e:
                raise EOFError from e
            if reply is not None:
                return reply
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                self._channel.settimeout(left)
                data = self._channel.recv(64 * 1024)
            except TimeoutError:
                raise
            except OSError as e:
                raise EOFError from e
            if not data:
                raise EOFError
            self._replies.add(data)

    def close(self) -> str | None:
        """Kill the sandbox, wait until nothing of it is left, and return what it wrote about a failure.

        Empty: there was no failure. None: its supervisor was lost, so that the reason of its end is not known.

        Raises:
            SandboxError: its processes have not ended in time.
        """
        if self._is_closed:
            return self._errors
        self._is_closed = True
        self._channel.close()
        try:
            self._lifeline.shutdown(socket.SHUT_WR)
            self._lifeline.settimeout(CLOSE_SECONDS)
            message = _read_reply(self._lifeline)
            if message is not None:
                self._errors, self.cpu_seconds = str(message["errors"]), float(message["cpu_seconds"])
        except TimeoutError as e:
            raise SandboxError(f"the processes of a sandbox did not end within {CLOSE_SECONDS:g} s") from e
        except OSError:
            pass  # as if it had ended without a message
        finally:
            self._lifeline.close()
        return self._errors


def _read_reply(connection: socket.socket) -> dict[str, Any] | None:
    """Return the only message of a connection that has a timeout; None if it ends without one.

    Raises:
        TimeoutError: it did not arrive in time.
    """
    buffer = ReplyBuffer(max_bytes=64 * 1024)
    while True:
        if (message := buffer.next()) is not None:
            return message
        data = connection.recv(4096)
        if not data:
            return None
        buffer.add(data)
