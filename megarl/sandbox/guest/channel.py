"""Messages over a stream: JSON objects, each after its length in four bytes."""

from __future__ import annotations

import json
import os
import struct

TYPE_CHECKING = False  # of `typing`, without its import, which delays the start of a sandbox
if TYPE_CHECKING:
    from typing import Any

_LENGTH = struct.Struct("!I")


def encode(message: dict[str, Any]) -> bytes:
    """Return the bytes of a message."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def write_message(fd: int, message: dict[str, Any]) -> None:
    """Write a message to a file descriptor that blocks.

    Raises:
        OSError: the other end is closed.
    """
    data = memoryview(encode(message))
    while data:
        data = data[os.write(fd, data) :]


def read_message(fd: int) -> dict[str, Any] | None:
    """Return the next message of a file descriptor that blocks; None at its end."""
    head = _read(fd, _LENGTH.size)
    if head is None:
        return None
    body = _read(fd, _LENGTH.unpack(head)[0])
    return None if body is None else dict(json.loads(body))


def _read(fd: int, num_bytes: int) -> bytes | None:
    data = b""
    while len(data) < num_bytes:
        part = os.read(fd, num_bytes - len(data))
        if not part:
            return None
        data += part
    return data


class MessageBuffer:
    """Splits bytes that arrive in pieces into messages."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: longest message."""
        self._data, self._max_bytes = bytearray(), max_bytes

    def add(self, data: bytes) -> None:
        """Append bytes that have arrived."""
        self._data += data

    def next(self) -> dict[str, Any] | None:
        """Return the next whole message; None where more bytes are needed.

        Raises:
            ValueError: the message is too long, or no JSON object.
        """
        if len(self._data) < _LENGTH.size:
            return None
        length = _LENGTH.unpack_from(self._data)[0]
        if length > self._max_bytes:
            raise ValueError(f"a message needs to have at most {self._max_bytes} bytes, got {length}")
        if len(self._data) < _LENGTH.size + length:
            return None
        body = bytes(self._data[_LENGTH.size : _LENGTH.size + length])
        del self._data[: _LENGTH.size + length]
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ValueError(f"a message needs to be a JSON object, got {type(message).__name__}")  # noqa: TRY004
        return message
