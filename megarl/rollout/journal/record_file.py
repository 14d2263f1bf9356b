"""Files that are appended to, frame by frame, and read up to where a killed writer left off.

    frame   HEADER | meta, JSON | body

A header says how long its frame is, so that a reader passes over bodies that it does not need.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAGIC = b"mgrj"
HEADER = struct.Struct("<4sIIIII")
"""Magic, length of meta, length of body, CRC-32 of meta, of body, and of the header before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where a whole frame is in its file, and what it says of itself."""

    meta: Mapping[str, Any]
    start: int
    """Of the body, in bytes."""
    length: int
    crc: int


def frame(meta: Mapping[str, Any], body: Any = b"") -> bytes:
    """The bytes of one frame; `body` is anything with a buffer."""
    said = json.dumps(meta).encode()
    length = memoryview(body).nbytes
    head = HEADER.pack(MAGIC, len(said), length, zlib.crc32(said), zlib.crc32(body), 0)
    return b"".join([head[:-4], struct.pack("<I", zlib.crc32(head[:-4])), said, body])


def scan(path: Path, start: int = 0) -> tuple[list[Frame], int]:
    """The whole frames from `start` on, and where the next one will begin.

    What a killed writer left unfinished is waited for; a file that is damaged elsewhere is told, and not read further.
    """
    frames: list[Frame] = []
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while start + HEADER.size <= size:
            file.seek(start)
            head = file.read(HEADER.size)
            magic, said, length, said_crc, crc, head_crc = HEADER.unpack(head)
            if magic != MAGIC or head_crc != zlib.crc32(head[:-4]):
                logger.warning("%s is damaged at byte %d; the groups behind are not used", path, start)
                return frames, size
            end = start + HEADER.size + said + length
            if end > size:
                break
            meta = file.read(said)
            if zlib.crc32(meta) == said_crc:
                frames.append(Frame(meta=json.loads(meta), start=end - length, length=length, crc=crc))
            else:
                logger.warning("%s is damaged at byte %d; the group there is not used", path, start)
            start = end
    return frames, start


def read_body(path: Path, where: Frame) -> bytes | None:
    """The frame's body; None, which is told, where it is damaged."""
    with path.open("rb") as file:
        file.seek(where.start)
        body = file.read(where.length)
    if zlib.crc32(body) == where.crc:
        return body
    logger.warning("%s is damaged behind byte %d; the group there is not used", path, where.start)
    return None


class FrameWriter:
    """Appends to a file of its own, which must be new.

    A frame that was written survives the process, not the machine: nothing is synced to disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def write(self, data: bytes) -> None:
        """Give the kernel all of `data`."""
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def close(self) -> None:
        """No more is written."""
        os.close(self._descriptor)
