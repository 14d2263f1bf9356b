"""Weights of 4 bits with a scale for each 32 values of a row, as published; they are decoded when they are read.

    stored                                                   weight
    NAME_blocks    uint8     [E, m, k / 32, 16]              MXFP4, of gpt-oss:      NAME    bfloat16    [E, k, m]
    NAME_scales    uint8     [E, m, k / 32]
    NAME_packed    int32     [m, k / 8]                      INT4, of Kimi-K2.5:     NAME    bfloat16    [m, k]
    NAME_scale     bfloat16  [m, k / 32]
    NAME_shape     int64     [2]

In both, 32 values take 16 bytes, and the first value of a byte is in its lower four bits:

    MXFP4    value e2m1 (twice that in `CODES`) times 2 ** (scale - 127), which is exact unless it overflows
    INT4     value (code minus 8) times the scale, rounded to the dtype of the scale

torch is not imported; `reader` decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megarl.errors import DataError
from megarl.model_files.file_plan import Box
from megarl.model_files.header import StoredTensor

GROUP, GROUP_BYTES = 32, 16
"""Values that share a scale, and the bytes that they take."""

PackedFormat = Literal["MXFP4", "INT4"]

_E2M1_TWICE = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
CODES: Mapping[PackedFormat, tuple[float, ...]] = {
    "MXFP4": (*_E2M1_TWICE, *(-value for value in _E2M1_TWICE)),
    "INT4": tuple(float(value) for value in range(-8, 8)),
}
"""Factor of each of the 16 codes. Twice those of MXFP4 go with 2 ** (scale - 128), which bfloat16 always holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor(StoredTensor):
    """A weight of 4 bits. `shape` and `dtype` are those of the decoded weight, `file` and `offset` of its values."""

    format: PackedFormat
    values: StoredTensor
    """uint8 [..., m, k / 2]."""
    scales: StoredTensor
    """[..., m, k / 32]."""
    stated_shape: StoredTensor | None
    """Stored shape of the weight, [2]."""

    @property
    def is_transposed(self) -> bool:
        """Whether the last two dimensions of the stored values are those of the weight, swapped."""
        return self.format == "MXFP4"

    def swap(self, box: Box) -> Box:
        """Return a box of the weight as a box of the stored values, or the other way around."""
        return (*box[:-2], box[-1], box[-2]) if self.is_transposed else box


def combine_packed(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with the weight of 4 bits in place of each group of tensors that stores one.

    Raises:
        DataError: a tensor of a group is missing or does not fit, or the weight is also stored plainly.
    """
    combined = dict(tensors)
    for values_name, values in tensors.items():
        name, _, ending = values_name.rpartition("_")
        if (ending, values.dtype) not in (("blocks", "uint8"), ("packed", "int32")):
            continue
        if name in tensors:
            raise DataError(f"{values.file}: {values_name} and {tensors[name].file}: {name} are the same weight")
        combined[name] = _mxfp4(name, tensors) if ending == "blocks" else _int4(name, tensors)
        for part in ("blocks", "scales") if ending == "blocks" else ("packed", "scale", "shape"):
            del combined[f"{name}_{part}"]
    return combined


def _mxfp4(name: str, tensors: Mapping[str, StoredTensor]) -> PackedTensor:
    blocks = tensors[f"{name}_blocks"]
    if len(blocks.shape) != 4 or blocks.shape[3] != GROUP_BYTES:
        raise DataError(f"{blocks.file}: {name}_blocks needs shape [E, m, k / 32, 16], got {list(blocks.shape)}")
    experts, rows, groups, _ = blocks.shape
    return PackedTensor(
        file=blocks.file,
        offset=blocks.offset,
        shape=(experts, groups * GROUP, rows),
        dtype="bfloat16",
        format="MXFP4",
        values=replace(blocks, shape=(experts, rows, groups * GROUP_BYTES)),
        scales=_part(tensors, f"{name}_scales", ("uint8",), (experts, rows, groups), of=blocks),
        stated_shape=None,
    )


def _int4(name: str, tensors: Mapping[str, StoredTensor]) -> PackedTensor:
    packed = tensors[f"{name}_packed"]
    if len(packed.shape) != 2 or packed.shape[1] * 4 % GROUP_BYTES:
        raise DataError(
            f"{packed.file}: {name}_packed needs shape [m, k / 8], k a multiple of {GROUP}, got {list(packed.shape)}"
        )
    rows, num_bytes = packed.shape[0], packed.shape[1] * 4
    scales = (rows, num_bytes // GROUP_BYTES)
    scale = _part(tensors, f"{name}_scale", ("bfloat16", "float16", "float32"), scales, of=packed)
    return PackedTensor(
        file=packed.file,
        offset=packed.offset,
        shape=(rows, num_bytes * 2),
        dtype=scale.dtype,
        format="INT4",
        values=replace(packed, shape=(rows, num_bytes), dtype="uint8"),
        scales=scale,
        stated_shape=_part(tensors, f"{name}_shape", ("int64", "int32"), (2,), of=packed),
    )


def _part(
    tensors: Mapping[str, StoredTensor], name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], *, of: StoredTensor
) -> StoredTensor:
    """Return tensor `name`, which has one of these dtypes and this shape."""
    part = tensors.get(name)
    if part is None or part.dtype not in dtypes or part.shape != shape:
        got = "none" if part is None else f"{part.dtype} {list(part.shape)}"
        raise DataError(
            f"{(part or of).file}: {name} needs {' or '.join(dtypes)} {list(shape)}, for the weight of 4 bits with "
            f"values of shape {list(of.shape)}, got {got}"
        )
    return part
