"""Sink of an export: writes received boxes to this rank's files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megarl.model_files.file_boxes import relative_slices, split_box
from megarl.model_files.writer import SafetensorsWriter
from megarl.reshard.layout.layout import Box, extent, intersect, volume
from megarl.reshard.transfer.bucket import BoxBucket, BoxSlot, identify_memory, map_bucket, torch_dtype

MAX_JOINED_ELEMENTS = 2**19
"""Maximum number of elements of rows that are joined before they are written."""


class FileSink:
    """Writes each round's boxes to this rank's files while the next round is transferred.

    After a write error it keeps receiving rounds without writing them: the other ranks would wait for it.
    """

    def __init__(self, writer: SafetensorsWriter) -> None:
        self._writer = writer
        self._error: OSError | None = None
        self._thread = ThreadPoolExecutor(1)
        self._mapped: dict[tuple[int | str, ...], Tensor] = {}

    def load_boxes(self, _: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """Write the boxes of a round in the background; the returned function waits for it (`ShardSink`)."""
        if bucket is None:
            return lambda: None
        key, _size = identify_memory(bucket)
        if key not in self._mapped:
            self._mapped[key] = map_bucket(bucket)
        return self._thread.submit(self._try_to_write, self._mapped[key], bucket.slots).result

    def close(self) -> None:
        """Wait for pending writes and unmap the buckets."""
        self._thread.shutdown()
        self._mapped.clear()

    def finish(self) -> None:
        """Fsync the files; raise the first OSError of the writes, if any."""
        if self._error is not None:
            raise self._error
        self._writer.finish()

    def _try_to_write(self, data: Tensor, slots: Sequence[BoxSlot]) -> None:
        if self._error is None:
            try:
                self._write(data, slots)
            except OSError as e:
                self._error = e

    def _write(self, data: Tensor, slots: Sequence[BoxSlot]) -> None:
        boxes: dict[str, dict[Box, Tensor]] = defaultdict(dict)
        for slot in slots:
            elements = data[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype))
            boxes[slot.local][slot.local_box] = elements.view(extent(slot.local_box))
        for name, values in boxes.items():
            union = _bounding_rows(list(values), self._writer.full_box(name))
            if union is None:
                for box, tensor in values.items():
                    self._writer.write(name, box, tensor)
            else:
                self._write_joined(name, union, values)

    def _write_joined(self, name: str, union: Box, values: Mapping[Box, Tensor]) -> None:
        """Join rows whose columns come from several ranks, so that they are written at once, not per rank and row."""
        for strip in split_box(union, MAX_JOINED_ELEMENTS):
            rows = torch.empty(extent(strip), dtype=next(iter(values.values())).dtype)
            for box, tensor in values.items():
                shared = intersect(box, strip)
                if shared is not None:
                    rows[relative_slices(shared, strip)] = tensor[relative_slices(shared, box)].to(rows.device)
            self._writer.write(name, strip, rows)


def _bounding_rows(boxes: Sequence[Box], tensor: Box) -> Box | None:
    """Return the union of the boxes if it is a box and some of them do not span full rows; else None."""
    if all(box[1:] == tensor[1:] for box in boxes):
        return None
    union = tuple((min(box[dim][0] for box in boxes), max(box[dim][1] for box in boxes)) for dim in range(len(tensor)))
    return union if volume(union) == sum(map(volume, boxes)) else None
