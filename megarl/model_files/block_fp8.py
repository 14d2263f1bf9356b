"""FP8 weights as DeepSeek-V3 publishes them: e4m3 values, and a float32 factor for each block of 128 x 128.

    model.layers.0.mlp.down_proj.weight              float8_e4m3fn [7168, 18432]
    model.layers.0.mlp.down_proj.weight_scale_inv    float32       [56, 144]       weight = values * factor

torch is not imported. `megarl_kernels.fp8_block` quantizes and dequantizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from megarl.model_files.header import StoredTensor
from megarl.model_files.json_object import JsonMapping
from megarl.model_files.quantization import CONFIG_KEY, quantized_format

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
