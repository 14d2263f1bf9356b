"""Messages between a host and a runner, each after its length in four bytes, and the limits that they agree on.

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

MIB = 2**20


class Limits:
    """What programs in a sandbox may use at most. No dataclass: importing those takes a third of a runner's start."""

    __slots__ = ("cpu_seconds", "disk_bytes", "max_processes", "memory_bytes", "output_bytes", "wall_seconds")

    def __init__(
        self,
        *,
        wall_seconds: float = 10.0,
        cpu_seconds: int = 5,
        memory_bytes: int = 512 * MIB,
        disk_bytes: int = 64 * MIB,
        max_processes: int = 16,
        output_bytes: int = 64 * 1024,
    ) -> None:
        """Create limits.

        Args:
            wall_seconds: time of one program, or of one cell of an interpreter.
            cpu_seconds: CPU time of one process of a program; of an interpreter only `wall_seconds` counts.
            memory_bytes: address space of each process, and resident memory of all of them together.
            disk_bytes: size of the folder /tmp, which is in memory.
            max_processes: processes and threads at once, including the one that runs the programs.
            output_bytes: bytes of stdout, of stderr and of a returned value.
        """
        self.wall_seconds, self.cpu_seconds = wall_seconds, cpu_seconds
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self.max_processes, self.output_bytes = max_processes, output_bytes

    def enlarged(self, *, output_bytes: int, input_bytes: int) -> Limits:
        """Return the limits with room for an output of this size, and for an input beside the files of the program."""
        changed = {
            "output_bytes": max(self.output_bytes, output_bytes),
            "disk_bytes": self.disk_bytes + input_bytes,
        }
        return Limits(**self.as_dict() | changed)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, float]:
        """Return the arguments that make these limits."""
        return {name: getattr(self, name) for name in self.__slots__}


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
