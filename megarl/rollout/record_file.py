"""Append-only files of records, which can be read even if their writer was killed while it wrote a record.

    record   HEADER | meta, JSON | body

The header holds the lengths of meta and body, so that a reader can skip bodies that it does not need.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from collections.abc import Buffer
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.process.atomic_files import make_durable_folder, sync_path
from megarl.model_files.json_object import JsonMapping

logger = logging.getLogger(__name__)

MAGIC = b"mgrj"
HEADER = struct.Struct("<4sIIIII")
"""Magic, length of meta, length of body, CRC-32 of meta, of body, and of the header before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The metadata of a complete record and the position of its body in the file."""

    meta: JsonMapping
    start: int
    """Offset of the body in the file, in bytes."""
    length: int
    """Length of the body in bytes."""
    crc: int
    """CRC-32 of the body."""


def encode_record(meta: JsonMapping, body: Buffer = b"") -> bytes:
    """Return the bytes of one record; `body` is any object that supports the buffer protocol."""
    meta_bytes = json.dumps(meta).encode()
    length = memoryview(body).nbytes
    head = HEADER.pack(MAGIC, len(meta_bytes), length, zlib.crc32(meta_bytes), zlib.crc32(body), 0)
    return b"".join([head[:-4], struct.pack("<I", zlib.crc32(head[:-4])), meta_bytes, body])


def read_records(path: Path, start: int = 0) -> tuple[list[Record], int]:
    """Read the complete records from byte `start` on.

    An incomplete record at the end of the file is left for a later call: its writer may still be writing it. Damage
    elsewhere is logged as a warning; a damaged header ends the reading of the file.

    Returns:
        The records, and the offset at which the next call continues.
    """
    records: list[Record] = []
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while start + HEADER.size <= size:
            file.seek(start)
            head = file.read(HEADER.size)
            magic, meta_length, length, meta_crc, crc, head_crc = HEADER.unpack(head)
            if magic != MAGIC or head_crc != zlib.crc32(head[:-4]):
                logger.warning("%s is damaged at byte %d; the groups after it are not used", path, start)
                return records, size
            end = start + HEADER.size + meta_length + length
            if end > size:
                break
            meta = file.read(meta_length)
            if zlib.crc32(meta) == meta_crc:
                records.append(Record(meta=json.loads(meta), start=end - length, length=length, crc=crc))
            else:
                logger.warning("%s is damaged at byte %d; the group there is not used", path, start)
            start = end
    return records, start


def read_body(path: Path, where: Record) -> bytes | None:
    """Return the record's body, or None with a logged warning if the body is damaged."""
    with path.open("rb") as file:
        file.seek(where.start)
        body = file.read(where.length)
    if zlib.crc32(body) == where.crc:
        return body
    logger.warning("%s is damaged after byte %d; the group there is not used", path, where.start)
    return None


class RecordWriter:
    """Appends records to a new file that only this writer writes to; a written record is on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_durable_folder(path.parent)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        sync_path(path.parent)

    def write(self, data: bytes) -> None:
        """Write all of `data` to the file, and fsync it."""
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; nothing may be written afterwards."""
        os.close(self._descriptor)
