"""Formats of quantized weights that are read: what config.json states about them, and how they are stored.

    FP8      quant_method: fp8                   DeepSeek-V3, Kimi-K2
    MXFP4    quant_method: mxfp4                 gpt-oss
    INT4     quant_method: compressed-tensors    Kimi-K2.5

The stored tensors say which weights are quantized. FP8 weights, as DeepSeek-V3 publishes them, are e4m3 values and a
float32 factor for each block of 128 x 128:

    model.layers.0.mlp.down_proj.weight              float8_e4m3fn [7168, 18432]
    model.layers.0.mlp.down_proj.weight_scale_inv    float32       [56, 144]       weight = values * factor

Weights of 4 bits have a scale for each 32 values of a row:

    stored                                                   weight
    NAME_blocks    uint8     [E, m, k / 32, 16]              MXFP4:    NAME    bfloat16    [E, k, m]
    NAME_scales    uint8     [E, m, k / 32]
    NAME_packed    int32     [m, k / 8]                      INT4:     NAME    bfloat16    [m, k]
    NAME_scale     bfloat16  [m, k / 32]
    NAME_shape     int64     [2]

In both, 32 values take 16 bytes, and the first value of a byte is in its lower four bits:

    MXFP4    value e2m1 (twice that in `CODES`) times 2 ** (scale - 127), which is exact unless it overflows
    INT4     value (code minus 8) times the scale, rounded to the dtype of the scale

torch is not imported. `megarl_kernels.fp8_block` quantizes and dequantizes FP8; `tensor_io` decodes 4 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megarl.errors import DataError
from megarl.model_files.file_plan import Box
from megarl.model_files.header import StoredTensor
from megarl.model_files.json_object import JsonMapping

CONFIG_KEY = "quantization_config"
"""Key of config.json that describes how weights are quantized."""

QuantizedFormat = Literal["FP8", "MXFP4", "INT4"]

_FORMATS: Mapping[str, QuantizedFormat] = {"fp8": "FP8", "mxfp4": "MXFP4", "compressed-tensors": "INT4"}
"""Format by `quant_method`."""

Needs = Mapping[str, tuple[object, ...]]
"""Key -> supported values; None: the key may be missing."""

_FP8: Needs = {"weight_block_size": ([128, 128],), "fmt": ("e4m3", "float8_e4m3fn", None)}  # MiniMax-M2.5: the second
_INT4: Needs = {
    "format": ("pack-quantized",),
    "quantization_status": ("compressed", None),
    "kv_cache_scheme": (None,),
    "transform_config": (None, {}),
}
_INT4_GROUP: Needs = {
    "format": ("pack-quantized", None),
    "input_activations": (None,),
    "output_activations": (None,),
}
_INT4_WEIGHTS: Needs = {
    "num_bits": (4,),
    "type": ("int", None),
    "strategy": ("group", None),
    "group_size": (32,),
    "symmetric": (True, None),
    "actorder": (None,),
}


def quantized_format(config: JsonMapping) -> QuantizedFormat | None:
    """Return the format that the language model's keys of a config.json state; None if it states none that is read."""
    stated = config.get(CONFIG_KEY)
    return _FORMATS.get(str(stated.get("quant_method"))) if isinstance(stated, Mapping) else None


def find_config_problem(config: JsonMapping) -> str | None:
    """Return why weights cannot be read that are quantized as a config.json says; None if they can, or are not."""
    stated = config.get(CONFIG_KEY)
    if not stated:
        return None
    return next(_config_problems(stated if isinstance(stated, Mapping) else {}), None)


def _config_problems(stated: JsonMapping) -> Iterator[str]:
    method = stated.get("quant_method")
    if method not in _FORMATS:
        yield f"{CONFIG_KEY}.quant_method needs {' or '.join(_FORMATS)}, got {method}; others cannot be read"
    elif method == "fp8":
        yield from _mismatches(stated, _FP8, CONFIG_KEY)
    elif method == "compressed-tensors":
        yield from _mismatches(stated, _INT4, CONFIG_KEY)
        groups = stated.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            yield f"{CONFIG_KEY}.config_groups needs a group of weights, got {groups}"
            return
        for name, group in groups.items():
            key = f"{CONFIG_KEY}.config_groups.{name}"
            yield from _mismatches(group, _INT4_GROUP, key)
            yield from _mismatches(group.get("weights") or {}, _INT4_WEIGHTS, f"{key}.weights")


def _mismatches(stated: JsonMapping, needs: Needs, where: str) -> Iterator[str]:
    for key, allowed in needs.items():
        if stated.get(key) not in allowed:
            yield f"{where}.{key} needs {allowed[0]}, got {stated.get(key)}; other quantized weights cannot be read"


BLOCK = 128
"""Rows and columns of a block."""
VALUES_DTYPE, SCALES_DTYPE = "float8_e4m3fn", "float32"
"""Torch dtype names of values and scales. Published scales may also have another floating-point dtype."""
SCALE_SUFFIX = "_scale_inv"
"""Suffix of a weight's name that gives the name of its scales."""

_PROJECTION = re.compile(
    r"(?:(?:language_)?model\.)+layers\.\d+\.(?!eh_proj|.*weights_proj).*"
    r"(_proj|_proj_with_mqa|\.w[123]|indexer\.(wq_b|wk))\.weight"
)


def scale_name(name: str) -> str:
    """Return the name of the scales of weight `name`."""
    return name + SCALE_SUFFIX


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the scales of a weight [n, k]."""
    n, k = shape
    return -(-n // BLOCK), -(-k // BLOCK)


def is_quantized(name: str, config: JsonMapping) -> bool:
    """Return whether the model of a config.json with `quantization_config` has weight `name` in FP8.

    That is so for the projections of attention, MLP and experts, as models are published, except those that the key
    lists by module. A folder with weights says it itself.
    """
    stated = config.get(CONFIG_KEY)
    if quantized_format(config) != "FP8" or not isinstance(stated, Mapping) or _PROJECTION.fullmatch(name) is None:
        return False
    excluded = stated.get("modules_to_not_convert") or stated.get("ignored_layers") or ()
    return name.removesuffix(".weight") not in excluded


def scales_of(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return name of the scales -> name of the weight, for each weight in FP8, whether or not its scales exist."""
    return {scale_name(name): name for name, stored in tensors.items() if stored.dtype == VALUES_DTYPE}


def find_scale_problems(tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield one message for each weight in FP8 whose scales are missing or have the wrong shape."""
    for scales, name in scales_of(tensors).items():
        weight = tensors[name]
        if len(weight.shape) != 2:
            yield f"{weight.file}: {name} is {VALUES_DTYPE} and needs 2 dimensions, got shape {list(weight.shape)}"
        elif scales not in tensors:
            yield f"{weight.file}: {name} is {VALUES_DTYPE}, and its scales {scales} are missing"
        elif tensors[scales].shape != scale_shape(weight.shape):
            yield (
                f"{tensors[scales].file}: {scales} needs shape {list(scale_shape(weight.shape))}, one scale for each "
                f"block of {BLOCK} x {BLOCK} of {list(weight.shape)}, got {list(tensors[scales].shape)}"
            )


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
