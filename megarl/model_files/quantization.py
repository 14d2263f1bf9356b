"""Formats of quantized weights that are read: what config.json states about them, and how blocks of FP8 are stored.

    FP8      quant_method: fp8                   DeepSeek-V3, Kimi-K2      below
    MXFP4    quant_method: mxfp4                 gpt-oss                   `packed_weights`
    INT4     quant_method: compressed-tensors    Kimi-K2.5                 `packed_weights`

The stored tensors say which weights are quantized. FP8 weights, as DeepSeek-V3 publishes them, are e4m3 values and a
float32 factor for each block of 128 x 128:

    model.layers.0.mlp.down_proj.weight              float8_e4m3fn [7168, 18432]
    model.layers.0.mlp.down_proj.weight_scale_inv    float32       [56, 144]       weight = values * factor

torch is not imported. `megarl_kernels.fp8_block` quantizes and dequantizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

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
