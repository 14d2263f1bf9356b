"""Messages between a host and a runner, each after its length in four bytes.

host -> runner   requests, by `marshal`: both run the same Python, and the runner trusts its host
runner -> host   replies, as JSON objects of texts, numbers and truth values: the host trusts nothing from a sandbox

The module `json` is not imported here: that would take a fifth of the CPU time of a sandbox.
"""

from __future__ import annotations

import marshal
import os
import struct
from _json import encode_basestring_ascii

TYPE_CHECKING = False  # of `typing`, without its import, which delays the start of a sandbox
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

LENGTH = struct.Struct("!I")


def encode_request(request: dict[str, Any]) -> bytes:
    """Return the bytes of a request, of built-in types."""
    body = marshal.dumps(request)
    return LENGTH.pack(len(body)) + body


def read_request(fd: int) -> dict[str, Any] | None:
    """Return the next request of a file descriptor that blocks; None at its end."""
    head = _read(fd, LENGTH.size)
    if head is None:
        return None
    body = _read(fd, LENGTH.unpack(head)[0])
    return None if body is None else dict(marshal.loads(body))  # noqa: S302 -- of the host


def write_reply(fd: int, reply: Mapping[str, str | float]) -> None:
    """Write a reply to a file descriptor that blocks.

    Raises:
        OSError: the other end is closed.
    """
    body = encode_reply(reply)
    data = memoryview(LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]


def encode_reply(reply: Mapping[str, str | float]) -> bytes:
    """Return a JSON object; its numbers are finite."""
    items = [f"{encode_basestring_ascii(name)}:{_encode_value(value)}" for name, value in reply.items()]
    return f"{{{','.join(items)}}}".encode()


def _encode_value(value: str | float) -> str:
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def _read(fd: int, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        part = os.read(fd, num_bytes - len(data))
        if not part:
            return None
        data += part
    return bytes(data)
